"""Messages between the controller and its helper processes, one line each. Pure.

The controller starts the fork server and the Ray bridge from its own release, so both
sides speak the same version. The first line states it all the same.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

VERSION = 1
"""Version of these messages."""

M = TypeVar("M")


class Line(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """One message; the name of its type is its tag."""


# Messages of both helper processes.


class Launch(Line, frozen=True):
    """An order to start a process of the service.

    Attributes:
        name: Its name in the service.
        args: Its ``ProcessArgs`` as JSON.
        log: File for its output; empty: the output of the fork server.
        env: Variables added to its environment.
        leash: Path of the leash that it wears; empty: none.
    """

    name: str
    args: str
    log: str
    env: dict[str, str]
    leash: str = ""


class Launched(Line, frozen=True):
    """A started process; ``began`` as in ``RunningProcess``, 0 if unknown."""

    name: str
    pid: int
    began: int = 0


class LaunchFailed(Line, frozen=True):
    """A process that could not be started, and why."""

    name: str
    error: str


class Exited(Line, frozen=True):
    """A process that has exited; ``code`` is None if unknown."""

    name: str
    code: int | None


class Ping(Line, frozen=True):
    """A question whether the helper process still works."""

    number: int


class Pong(Line, frozen=True):
    """The answer to the ``Ping`` of the same number."""

    number: int


# Messages of the fork server.


class Warm(Line, frozen=True):
    """The first line of the fork server: all modules are imported."""

    pid: int
    version: int = VERSION


ForkOrder = Launch | Ping
ForkNews = Warm | Launched | LaunchFailed | Exited | Pong


# Messages of the Ray bridge.


class WarmNodes(Line, frozen=True):
    """An order to keep a fork server on every machine; it precedes all launches.

    Attributes:
        preload: Modules that the fork servers import.
        folder: Folder in which the service was started; modules may be imported from
            it.
        logs: Folder for the output of the fork servers, if it exists on the machine.
    """

    preload: tuple[str, ...]
    folder: str
    logs: str


class LaunchActor(Line, frozen=True):
    """An order to start a replica in a placement group, with one actor for each rank.

    Attributes:
        name: Name of the replica.
        key: Ray's id of the machine.
        address: Address of the machine.
        bundle: Resources that Ray reserves for each rank.
        args: ``ProcessArgs`` as JSON, by rank.
        env: Variables added to the environment of each rank.
        log: File for the output, if its folder exists on the machine.
    """

    name: str
    key: str
    address: str
    bundle: dict[str, float]
    args: tuple[str, ...]
    env: dict[str, str]
    log: str


class AdoptActor(Line, frozen=True):
    """An order to watch a replica of an earlier controller.

    Attributes:
        name: Name of the replica.
        ranks: Number of its ranks.
        must_be_known: True if a replica that the head does not know counts as exited.
    """

    name: str
    ranks: int
    must_be_known: bool


class KillActor(Line, frozen=True):
    """An order to end a replica and release its resources."""

    name: str
    ranks: int


class Sweep(Line, frozen=True):
    """An order to end all replicas of this service except ``known``."""

    known: tuple[str, ...]


ActorOrder = WarmNodes | LaunchActor | AdoptActor | KillActor | Sweep | Ping


class ClusterNode(msgspec.Struct, frozen=True):
    """A machine of the cluster.

    Attributes:
        name: Its name for people.
        key: Ray's id of it.
        address: Its address.
        cpus: Number of CPU cores.
        memory_bytes: Bytes of memory.
        gpus: Index, kind and bytes of memory of each GPU.
        bfloat16: Cost of bfloat16; see ``resources.amounts.Node``.
    """

    name: str
    key: str
    address: str
    cpus: float
    memory_bytes: int
    gpus: tuple[tuple[int, str, int], ...] = ()
    bfloat16: float | None = None


class ClusterReady(Line, frozen=True):
    """The first line of the bridge: it is connected."""

    nodes: tuple[ClusterNode, ...]
    version: int = VERSION


class ClusterNodes(Line, frozen=True):
    """An answer of the head.

    Attributes:
        nodes: The machines of the cluster.
        is_same: True if the machines have not changed since the last answer.
    """

    nodes: tuple[ClusterNode, ...]
    is_same: bool


BridgeNews = ClusterReady | ClusterNodes | Launched | LaunchFailed | Exited | Pong


class LineCodec(Generic[M]):
    """Encoder and decoder of messages as lines.

    Args:
        kind: Type of the messages, or a union of types.
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
            ValueError: The line is malformed or of an unexpected type.
        """
        return self._decoder.decode(line)


_ENCODER = msgspec.json.Encoder()

FORK_ORDERS: LineCodec[ForkOrder] = LineCodec(ForkOrder)
FORK_NEWS: LineCodec[ForkNews] = LineCodec(ForkNews)
ACTOR_ORDERS: LineCodec[ActorOrder] = LineCodec(ActorOrder)
BRIDGE_NEWS: LineCodec[BridgeNews] = LineCodec(BridgeNews)
