"""Messages between the controller and its helper processes, one line each. Pure.

The fork server and the Ray bridge are started by the controller from its own release,
so both sides always speak the same version; the first line says which all the same.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

VERSION = 1
"""Version of these messages."""

M = TypeVar("M")


class Line(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """One message; its type's name says which."""


# What both are told, and tell.


class Launch(Line, frozen=True):
    """Start a process of the service.

    Attributes:
        args: Its ``ProcessArgs`` as JSON.
        log: The file that its output goes to.
        env: Added to its environment.
    """

    name: str
    args: str
    log: str
    env: dict[str, str]


class Launched(Line, frozen=True):
    """A process runs; ``began`` as in ``RunningProcess``, 0 if it is not known."""

    name: str
    pid: int
    began: int = 0


class LaunchFailed(Line, frozen=True):
    """A process could not be started."""

    name: str
    error: str


class Exited(Line, frozen=True):
    """A process has ended; ``code`` is None where nobody could tell it."""

    name: str
    code: int | None


# The fork server.


class Warm(Line, frozen=True):
    """Everything is imported; the first line of the fork server."""

    pid: int
    version: int = VERSION


ForkNews = Warm | Launched | LaunchFailed | Exited


# The Ray bridge.


class LaunchActor(Line, frozen=True):
    """Start a replica as actors, one for each of its ranks, in a placement group.

    Attributes:
        key: Ray's id of the machine.
        address: Its address.
        bundle: What Ray sets aside for each rank.
        args: ``ProcessArgs`` as JSON, by rank.
        env: Added to the environment of each.
        folder: Where the service was started; what is imported may lie there.
        log: The file that its output goes to.
    """

    name: str
    key: str
    address: str
    bundle: dict[str, float]
    args: tuple[str, ...]
    env: dict[str, str]
    folder: str
    log: str


class AdoptActor(Line, frozen=True):
    """Watch a replica of an earlier controller.

    Attributes:
        must_be_known: It has ended if the head does not know it.
    """

    name: str
    ranks: int
    must_be_known: bool


class KillActor(Line, frozen=True):
    """End a replica, and give its resources back."""

    name: str
    ranks: int


class Sweep(Line, frozen=True):
    """End all replicas of this service but the named ones."""

    known: tuple[str, ...]


ActorOrder = LaunchActor | AdoptActor | KillActor | Sweep


class ClusterNode(msgspec.Struct, frozen=True):
    """A machine of the cluster; GPUs as index, kind and bytes of memory."""

    name: str
    key: str
    address: str
    cpus: float
    memory_bytes: int
    gpus: tuple[tuple[int, str, int], ...] = ()


class ClusterReady(Line, frozen=True):
    """The bridge is connected; its first line."""

    nodes: tuple[ClusterNode, ...]
    version: int = VERSION


class ClusterNodes(Line, frozen=True):
    """The head answers; ``is_same``: with the same machines as before."""

    nodes: tuple[ClusterNode, ...]
    is_same: bool


BridgeNews = ClusterReady | ClusterNodes | Launched | LaunchFailed | Exited


class LineCodec(Generic[M]):
    """Reads and writes messages as lines.

    Args:
        kind: The expected type, or a union of them.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[M] = msgspec.json.Decoder(kind)

    @staticmethod
    def encode(message: Line) -> bytes:
        """Return a message as a line."""
        return _ENCODER.encode(message) + b"\n"

    def decode(self, line: bytes) -> M:
        """Return the message of a line.

        Raises:
            ValueError: It is none that is expected.
        """
        return self._decoder.decode(line)


_ENCODER = msgspec.json.Encoder()

FORK_ORDERS: LineCodec[Launch] = LineCodec(Launch)
FORK_NEWS: LineCodec[ForkNews] = LineCodec(ForkNews)
ACTOR_ORDERS: LineCodec[ActorOrder] = LineCodec(ActorOrder)
BRIDGE_NEWS: LineCodec[BridgeNews] = LineCodec(BridgeNews)
