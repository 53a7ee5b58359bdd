"""Messages between the controller and its helper processes, one line each. Pure."""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """One message; the name of its type is its tag."""


# Messages of both helper processes.


class Launch(Line, frozen=True, tag="Launch"):
    """Start a process of the service (controller → fork server)."""

    name: str
    args: str  # ``ProcessArgs`` as JSON
    log: str  # file for its output; empty: the fork server's output
    env: dict[str, str]
    leash: str = ""  # path of the leash that it wears, see ``Leash``; empty: none


class Launched(Line, frozen=True, tag="Launched"):
    """A process was started; ``began`` is as in ``RunningProcess``, 0 if unknown."""

    name: str
    pid: int
    began: int = 0


class LaunchFailed(Line, frozen=True, tag="LaunchFailed"):
    name: str
    error: str


class Exited(Line, frozen=True, tag="Exited"):
    """A process has exited; ``code`` is None if unknown."""

    name: str
    code: int | None


class Ping(Line, frozen=True, tag="Ping"):
    """Check whether the helper process still responds (controller → helper)."""


class Pong(Line, frozen=True, tag="Pong"):
    """Answer to a ``Ping`` (helper → controller)."""


# Messages of the fork server.


class Begin(Line, frozen=True, tag="Begin"):
    """First order with the arguments (controller → forked fork server)."""

    modules: tuple[str, ...]
    env: dict[str, str]
    log: str  # file for its output; empty: the output of the process that started it


class Warm(Line, frozen=True, tag="Warm"):
    """First line: all modules are imported (fork server → controller)."""

    pid: int


class Threaded(Line, frozen=True, tag="Threaded"):
    """The fork server exits: a module has started a thread, so it cannot fork."""

    module: str  # module that started the thread; empty if unknown


ForkOrder = Launch | Ping
ForkNews = Warm | Threaded | Launched | LaunchFailed | Exited | Pong


# Messages of the Ray bridge.


class WarmNodes(Line, frozen=True, tag="WarmNodes"):
    """Keep a fork server on every machine (controller → bridge); precedes launches."""

    preload: tuple[str, ...]
    folder: str  # working directory of the service, from which modules may be imported
    logs: str  # folder for the output of fork servers, if it exists on the machine


class LaunchActor(Line, frozen=True, tag="LaunchActor"):
    """Start a replica in a placement group (controller → bridge); an actor per rank."""

    name: str
    key: str
    address: str
    bundle: dict[str, float]  # resources that Ray reserves for each rank
    args: tuple[str, ...]  # ``ProcessArgs`` as JSON, by rank
    env: dict[str, str]
    log: str  # file for the output, if its folder exists on the machine


class AdoptActor(Line, frozen=True, tag="AdoptActor"):
    """Watch a replica of an earlier controller (controller → bridge)."""

    name: str
    ranks: int
    must_be_known: bool  # whether a replica unknown to the head counts as exited


class KillActor(Line, frozen=True, tag="KillActor"):
    """Kill a replica and release its resources (controller → bridge)."""

    name: str
    ranks: int


class Sweep(Line, frozen=True, tag="Sweep"):
    """Kill all replicas of this service except ``known`` (controller → bridge)."""

    known: tuple[str, ...]


ActorOrder = WarmNodes | LaunchActor | AdoptActor | KillActor | Sweep | Ping


class ClusterNode(msgspec.Struct, frozen=True):
    """A machine of the cluster; `key` is Ray's id, GPUs are (index, kind, bytes)."""

    name: str
    key: str
    address: str
    cpus: float
    memory_bytes: int
    gpus: tuple[tuple[int, str, int], ...] = ()
    bfloat16: float | None = None


class ClusterReady(Line, frozen=True, tag="ClusterReady"):
    """First line: the bridge is connected (bridge → controller)."""

    nodes: tuple[ClusterNode, ...]


class ClusterNodes(Line, frozen=True, tag="ClusterNodes"):
    """The head's machines; `is_same` if they are unchanged (bridge → controller)."""

    nodes: tuple[ClusterNode, ...]
    is_same: bool


BridgeNews = ClusterReady | ClusterNodes | Launched | LaunchFailed | Exited | Pong


def encode(message: Line) -> bytes:
    return _ENCODER.encode(message) + b"\n"


_ENCODER = msgspec.json.Encoder()

FORK_BEGIN: msgspec.json.Decoder[Begin] = msgspec.json.Decoder(Begin)
FORK_ORDERS: msgspec.json.Decoder[ForkOrder] = msgspec.json.Decoder(ForkOrder)
FORK_NEWS: msgspec.json.Decoder[ForkNews] = msgspec.json.Decoder(ForkNews)
ACTOR_ORDERS: msgspec.json.Decoder[ActorOrder] = msgspec.json.Decoder(ActorOrder)
BRIDGE_NEWS: msgspec.json.Decoder[BridgeNews] = msgspec.json.Decoder(BridgeNews)
