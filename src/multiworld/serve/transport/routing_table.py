"""The routing table of a service: its routes, its replicas and their edges. Pure.

The controller makes the table, numbers it and sends it to every process. Each process
derives from it which edges to open and which replicas to send work to.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field


class ReplicaState(enum.StrEnum):
    STARTING = "starting"
    """The process loads the model and connects; it gets probes only."""
    READY = "ready"
    """A probe has passed through it; it gets work."""
    DRAINING = "draining"
    """It gets no new work and finishes the work it has."""


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


@dataclass(frozen=True, slots=True)
class Route:
    """Routing settings of a model.

    Attributes:
        version: The version that new requests go to.
        stages: Number of stages of each running version.
        max_queued_requests: Maximum number of requests waiting at one gateway.
        max_ongoing_requests: Maximum number of requests of one gateway at a replica of
            stage 0.
        deadline_s: Deadline of requests that name none, in seconds.
        objective_s: Latency objective in seconds, for SLO attainment.
        on_demand: Stages that may scale to zero; a request waits until they have a
            replica.
        generates: The model generates text: its last stage also sends to stage 0.
    """

    version: str
    stages: dict[str, int]
    max_queued_requests: int = 512
    max_ongoing_requests: int = 32
    deadline_s: float = 30.0
    objective_s: float | None = None
    on_demand: tuple[int, ...] = ()
    generates: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)  # no slots: cached_property needs __dict__
class RoutingTable:
    """The gateways, routes and replicas of a service; ``number`` is its version."""

    number: int = 0
    gateways: tuple[str, ...] = ()
    routes: dict[str, Route] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)

    @functools.cached_property
    def stages(self) -> dict[tuple[str, str, int], list[Replica]]:
        """Replicas by model, version and stage."""
        found: dict[tuple[str, str, int], list[Replica]] = {}
        for replica in self.replicas.values():
            key = replica.model, replica.version, replica.stage
            found.setdefault(key, []).append(replica)
        return found

    def stage(self, model: str, version: str, stage: int) -> list[Replica]:
        return self.stages.get((model, version, stage), [])


@dataclass(frozen=True, slots=True)
class Edge:
    """A world of two processes that carries work; rank 0 is nearer to the clients.

    Attributes:
        peer: Name of the process at the other end.
        rank: Rank of this process.
        is_upstream: True if work comes from the peer. A gateway is upstream of every
            replica: it sends work to stage 0 and cancellations to all stages, and
            receives notes and answers.
    """

    world: str
    peer: str
    rank: int
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
    route = table.routes.get(me.model)
    if route is not None and route.generates:
        last = route.stages.get(me.version, 0) - 1
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
    """Return the names of the ready replicas, else of the starting ones."""
    ready = [r.name for r in replicas if r.state is ReplicaState.READY]
    starting = [r.name for r in replicas if r.state is ReplicaState.STARTING]
    return ready or starting
