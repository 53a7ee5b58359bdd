"""The routing table of a service: routes, replicas and edges. Pure.

The controller makes and numbers each table, and sends it to every process."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field


class ReplicaState(enum.StrEnum):
    STARTING = "starting"  # loads and connects; gets only probes
    READY = "ready"  # a probe has passed through it; gets work
    DRAINING = "draining"  # gets no new work, finishes what it has


@dataclass(frozen=True, slots=True)
class Replica:
    """One running copy of a stage; its name is never reused in this service."""

    name: str
    model: str
    version: str
    stage: int
    state: ReplicaState
    fingerprint: str = ""
    weights: str = ""
    # Number of stages of a version that generates text, whose last stage also sends to
    # stage 0; 0 for other versions. The number is kept here because a removed model has
    # no route, but may still have open streams.
    stages: int = 0
    # Random source of an external engine. A stream that has output tokens can continue
    # only with the same source; see ``WholeEngine.noise``.
    noise: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Routing settings of a model."""

    version: str  # version that serves new requests
    stages: dict[str, int]  # number of stages, by running version
    max_queued_requests: int = 512  # maximum requests that wait at one gateway
    max_ongoing_requests: int = 32  # maximum, from one gateway to a stage-0 replica
    deadline_s: float = 30.0  # deadline of requests that set none
    objective_s: float | None = None  # for SLO attainment
    # Stages that may scale to zero; requests then wait until a replica starts.
    on_demand: tuple[int, ...] = ()
    generates: bool = False  # the model generates text
    ttft_s: float | None = None
    tpot_s: float | None = None
    # ``deadline_s`` applies; False: only the waits for tokens have limits.
    has_deadline: bool = True
    is_refused: bool = False  # no replica can start: files of the version have changed


@dataclass(frozen=True)  # no slots: cached_property needs __dict__
class RoutingTable:
    """The gateways, routes and replicas of a service; ``number`` is its version."""

    number: int = 0
    gateways: tuple[str, ...] = ()
    routes: dict[str, Route] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)

    @functools.cached_property
    def stages(self) -> dict[tuple[str, str, int], list[Replica]]:
        found: dict[tuple[str, str, int], list[Replica]] = {}
        for replica in self.replicas.values():
            key = replica.model, replica.version, replica.stage
            found.setdefault(key, []).append(replica)
        return found

    def stage(self, model: str, version: str, stage: int) -> list[Replica]:
        return self.stages.get((model, version, stage), [])


@dataclass(frozen=True, slots=True)
class Edge:
    """A world of two processes that carries work; rank 0 is closer to clients."""

    world: str
    peer: str  # process at the other end
    rank: int  # of this process
    # Whether the peer sends work to this process. A gateway is upstream of every
    # replica: the gateway sends work to stage 0 and cancellations to all stages, and
    # receives notes and answers.
    is_upstream: bool


def edges_of(table: RoutingTable, process: str) -> dict[str, Edge]:
    """Return the edges that a process should have, by peer."""
    if process in table.gateways:
        return {name: _edge(process, name, 0) for name in table.replicas}
    me = table.replicas.get(process)
    if me is None:
        return {}
    edges = {name: _edge(name, process, 1) for name in table.gateways}
    for other in table.stage(me.model, me.version, me.stage - 1):
        edges[other.name] = _edge(other.name, process, 1)
    for other in table.stage(me.model, me.version, me.stage + 1):
        edges[other.name] = _edge(process, other.name, 0)
    last = me.stages - 1
    if me.stage == 0 and last > 1:
        for other in table.stage(me.model, me.version, last):
            edges[other.name] = _edge(process, other.name, 0)
    elif me.stage == last and last > 1:
        for other in table.stage(me.model, me.version, 0):
            edges[other.name] = _edge(other.name, process, 1)
    return edges


def _edge(upper: str, lower: str, rank: int) -> Edge:
    peer = lower if rank == 0 else upper
    return Edge(f"edge:{upper}>{lower}", peer, rank, is_upstream=rank == 1)


def first_ready(replicas: list[Replica]) -> list[str]:
    """Return the names of ready replicas or, if there are none, of starting ones."""
    ready = [r.name for r in replicas if r.state is ReplicaState.READY]
    starting = [r.name for r in replicas if r.state is ReplicaState.STARTING]
    return ready or starting
