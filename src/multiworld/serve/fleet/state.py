"""Desired and observed state of a service. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from multiworld.serve.transport.routing_table import ReplicaState


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """Desired state of one model.

    Attributes:
        max_ongoing_requests: Maximum number of requests in flight from one gateway to
            one replica of stage 0.
        on_demand: Numbers of the stages that scale to zero.
        ttft_s: Objective for the first token of a sequence, in seconds.
        tpot_s: Objective for each further token, in seconds.
        start_s: Seconds for a replica to become ready; None: the service's.
    """

    version: str
    replicas: tuple[int, ...]
    max_queued_requests: int = 512
    max_ongoing_requests: int = 32
    deadline_s: float = 30.0
    objective_s: float | None = None
    on_demand: tuple[int, ...] = ()
    generates: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    start_s: float | None = None


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Desired state of the service; `gateways` is a number of processes."""

    models: dict[str, DesiredModel] = field(default_factory=dict)
    gateways: int = 1


class ProcessPhase(enum.StrEnum):
    """Phase of a process's life, as observed by the controller."""

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
"""State in the routing table, by phase."""


@dataclass(slots=True)
class ProbeState:
    """Progress of a replica's probes; `gateway` sends the current one, if any."""

    gateway: str = ""
    asked_at: float = 0.0
    not_before: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Process:
    """Observed state of a worker, or of a gateway (with an empty ``model``).

    Attributes:
        since: Time of launch, readiness or start of draining, whichever was last, in
            monotonic seconds.
        applied: Number of the last routing table that the process has applied.
        drain_number: Number of the first routing table without this process as a
            target; senders that have applied it send nothing more.
        is_joined: Whether the control world with the process is ready.
        fingerprint: Hardware fingerprint on which its results depend; empty if unknown.
    """

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
    fingerprint: str = ""
    weights: str = ""
    entered: dict[ProcessPhase, float] = field(default_factory=dict)

    @property
    def is_gateway(self) -> bool:
        return not self.model

    @property
    def is_going(self) -> bool:
        return self.phase in (ProcessPhase.DRAINING, ProcessPhase.FINISHING)

    @property
    def is_starting(self) -> bool:
        return STATE_OF[self.phase] is ReplicaState.STARTING

    @property
    def is_there(self) -> bool:
        """True once it has joined its control world, and so can be reached."""
        return self.phase is not ProcessPhase.LAUNCHING
