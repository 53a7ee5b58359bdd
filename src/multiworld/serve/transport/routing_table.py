"""The table of a running service: who serves what, and who is connected to whom. Pure.

The controller makes it, numbers it, and tells it to every process. Each process finds
in it the edges that it should have, and which replicas it may send work to.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class ReplicaState(enum.StrEnum):
    """How far a replica is."""

    STARTING = "starting"
    """Its process runs, loads and connects; probes go through it."""
    READY = "ready"
    """A real forward pass has gone through it."""
    DRAINING = "draining"
    """It gets no new work, and ends what it has."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One running copy of a stage.

    Attributes:
        name: Unique for ever in this service.
        version: The version of the model it belongs to.
        stage: Number of the stage, from 0.
    """

    name: str
    model: str
    version: str
    stage: int
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class Route:
    """How requests for a model travel.

    Attributes:
        version: The version that new requests go to.
        stages: Number of stages of each version that runs.
        max_queued_requests: Most that wait at a router.
        max_ongoing_requests: Most that a replica of stage 0 has of one router.
        deadline_s: For requests that name none.
        objective_s: Within which answers should come, for the count of those that did.
        on_demand: The stages that have no replica while nobody asks; who asks waits
            until there is one.
    """

    version: str
    stages: dict[str, int]
    max_queued_requests: int = 512
    max_ongoing_requests: int = 32
    deadline_s: float = 30.0
    objective_s: float | None = None
    on_demand: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """Everything that the processes of a service must know of each other.

    Attributes:
        number: Grows with each change.
        gateways: Names of the processes that routers live in.
    """

    number: int = 0
    gateways: tuple[str, ...] = ()
    routes: dict[str, Route] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)

    def stage(self, model: str, version: str, stage: int) -> list[Replica]:
        """Return the replicas of a stage."""
        return [
            replica
            for replica in self.replicas.values()
            if (replica.model, replica.version, replica.stage)
            == (model, version, stage)
        ]


@dataclass(frozen=True, slots=True)
class Edge:
    """A world of two that carries work; the one nearer to the clients is rank 0.

    Attributes:
        world: Name of the world.
        peer: The process at the other end.
        rank: Rank of this process.
        is_upstream: Work comes from the peer. A router is upstream of everybody: work
            of stage 0 and cancels come from it, answers and notes go to it.
    """

    world: str
    peer: str
    rank: int
    is_upstream: bool


def edges_of(table: RoutingTable, process: str) -> dict[str, Edge]:
    """Return the edges that ``process`` should have, by peer."""
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
    return edges


def _edge(upper: str, lower: str, rank: int) -> Edge:
    peer = lower if rank == 0 else upper
    return Edge(f"edge:{upper}>{lower}", peer, rank, is_upstream=rank == 1)


def first_ready(replicas: list[Replica]) -> list[str]:
    """Return the ready ones for a probe, or else those that are starting."""
    ready = [r.name for r in replicas if r.state is ReplicaState.READY]
    starting = [r.name for r in replicas if r.state is ReplicaState.STARTING]
    return ready or starting
