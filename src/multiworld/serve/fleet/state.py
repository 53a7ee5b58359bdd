"""What is wanted of a service, and what is known of its processes. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from multiworld.serve.transport.routing_table import ReplicaState


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """One model, as it should be.

    Attributes:
        replicas: How many, by stage.
        on_demand: The stages that may have none while nobody asks.
    """

    version: str
    replicas: tuple[int, ...]
    max_queued_requests: int = 512
    max_ongoing_requests: int = 32
    deadline_s: float = 30.0
    objective_s: float | None = None
    on_demand: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DesiredState:
    """The service, as it should be."""

    models: dict[str, DesiredModel] = field(default_factory=dict)
    gateways: int = 1


class ProcessPhase(enum.StrEnum):
    """How far a process is, as the controller sees it."""

    LAUNCHING = "launching"
    JOINED = "joined"
    LOADED = "loaded"
    READY = "ready"
    DRAINING = "draining"
    FINISHING = "finishing"


STATE_OF = {
    ProcessPhase.LAUNCHING: ReplicaState.STARTING,
    ProcessPhase.JOINED: ReplicaState.STARTING,
    ProcessPhase.LOADED: ReplicaState.STARTING,
    ProcessPhase.READY: ReplicaState.READY,
    ProcessPhase.DRAINING: ReplicaState.DRAINING,
    ProcessPhase.FINISHING: ReplicaState.DRAINING,
}


@dataclass(slots=True)
class ProbeState:
    """Where the probing of a replica is.

    Attributes:
        gateway: Who was asked to send one; empty if nobody is.
        asked_at: When.
        not_before: When the next one may be sent.
        failures: In a row.
    """

    gateway: str = ""
    asked_at: float = 0.0
    not_before: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Process:
    """A worker (of a model) or a gateway (``model`` is empty)."""

    name: str
    model: str = ""
    version: str = ""
    stage: int = 0
    phase: ProcessPhase = ProcessPhase.LAUNCHING
    since: float = 0.0
    applied: int = 0
    drain_number: int = 0
    is_joined: bool = False
    is_drain_requested: bool = False
    probe: ProbeState = field(default_factory=lambda: ProbeState())

    @property
    def is_gateway(self) -> bool:
        """Whether it is a gateway."""
        return not self.model

    @property
    def is_going(self) -> bool:
        """Whether it is on its way out."""
        return self.phase in (ProcessPhase.DRAINING, ProcessPhase.FINISHING)
