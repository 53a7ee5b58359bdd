"""Desired and observed state of a service. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from multiworld.serve.transport.routing_table import ReplicaState


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """Desired state of one model.

    Attributes:
        version: The version that should serve.
        replicas: Number of replicas of each stage.
        max_queued_requests: Maximum number of requests that wait at a gateway.
        max_ongoing_requests: Maximum number of requests that a gateway may have
            outstanding at a replica of stage 0.
        deadline_s: Seconds that a request may take, unless it sets its own deadline.
        objective_s: Latency objective, in seconds; None without one.
        on_demand: Numbers of the stages that scale to zero.
        generates: Whether the model generates text.
        ttft_s: Objective for the first token of a text, in seconds.
        tpot_s: Objective for each further one.
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


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Desired state of the service.

    Attributes:
        models: Desired state of each model, by name.
        gateways: Number of gateway processes.
    """

    models: dict[str, DesiredModel] = field(default_factory=dict)
    gateways: int = 1


class ProcessPhase(enum.StrEnum):
    """The phase of a process in its life, as observed by the controller."""

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
    """Progress of the probes of a replica. Times are monotonic seconds.

    Attributes:
        gateway: Gateway that was asked to send the current probe; empty if none was.
        asked_at: Time of that request.
        not_before: Earliest time for the next probe.
        failures: Number of consecutive failures.
    """

    gateway: str = ""
    asked_at: float = 0.0
    not_before: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Process:
    """Observed state of a worker, or of a gateway (with an empty ``model``).

    Attributes:
        name: Unique name, never reused.
        model: Name of the model.
        version: Version of the model.
        stage: Number of the stage.
        phase: Current phase.
        since: Time of launch, readiness or start of draining, whichever was last, in
            monotonic seconds.
        applied: Number of the last routing table that the process has applied.
        drain_number: Number of the first routing table without this process as a
            target; senders that have applied it send nothing more.
        is_joined: True once the control world with the process is ready.
        is_drain_requested: True if the process is to be replaced, then drained.
        probe: Progress of its probes.
        fingerprint: Kind of machine that its results depend on, if it has told.
        weights: Name of its weights, if it has told.
        entered: Times at which it entered its phases, in monotonic seconds.
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
        """True for a gateway."""
        return not self.model

    @property
    def is_going(self) -> bool:
        """True while the process drains or finishes."""
        return self.phase in (ProcessPhase.DRAINING, ProcessPhase.FINISHING)

    @property
    def is_starting(self) -> bool:
        """True until it is ready."""
        return STATE_OF[self.phase] is ReplicaState.STARTING

    @property
    def is_there(self) -> bool:
        """True once it has joined its control world; before, nobody can reach it."""
        return self.phase is not ProcessPhase.LAUNCHING
