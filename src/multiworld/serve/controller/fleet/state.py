"""Desired and observed state of a service. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from multiworld.serve.wire.routing_table import ReplicaState


@dataclass(frozen=True, slots=True)
class DesiredModel:
    version: str
    replicas: tuple[int, ...]
    max_queued_requests: int = 512
    max_ongoing_requests: int = 32  # per gateway and replica of stage 0
    deadline_s: float = 30.0
    objective_s: float | None = None
    on_demand: tuple[int, ...] = ()  # numbers of the stages that scale to zero
    generates: bool = False
    ttft_s: float | None = None  # objective for the first token
    tpot_s: float | None = None  # objective for each further token
    start_s: float | None = None  # time limit of a start; None: ``ready_s`` of the spec
    has_deadline: bool = True  # False for text generation without ``deadline_s``
    spares: tuple[int, ...] = ()  # by stage: number of spares; empty: no spares

    def spares_of(self, stage: int) -> int:
        """Return how many spares a stage should have; none at zero replicas."""
        return self.spares[stage] if self.spares and self.replicas[stage] else 0


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Desired state of the service; ``gateways`` is a number of processes."""

    models: dict[str, DesiredModel] = field(default_factory=dict)
    gateways: int = 1
    # Digest of the desired gateway options; gateways with another digest are replaced.
    gateway_options: str = ""


class ProcessPhase(enum.StrEnum):
    """Phase of a process's life, as the controller observes it."""

    LAUNCHING = "launching"
    JOINED = "joined"
    LOADED = "loaded"
    SPARE = "spare"  # probed, but gets no work until it is needed
    READY = "ready"
    DRAINING = "draining"
    FINISHING = "finishing"


STARTING = (ProcessPhase.LAUNCHING, ProcessPhase.JOINED, ProcessPhase.LOADED)

# State in the routing table, by phase.
STATE_OF = {
    ProcessPhase.LAUNCHING: ReplicaState.STARTING,
    ProcessPhase.JOINED: ReplicaState.STARTING,
    ProcessPhase.LOADED: ReplicaState.STARTING,
    ProcessPhase.SPARE: ReplicaState.STARTING,
    ProcessPhase.READY: ReplicaState.READY,
    ProcessPhase.DRAINING: ReplicaState.DRAINING,
    ProcessPhase.FINISHING: ReplicaState.DRAINING,
}


@dataclass(slots=True)
class ProbeState:
    """Progress of a replica's probes; ``gateway`` sends the current one; "": none."""

    gateway: str = ""
    asked_at: float = 0.0
    not_before: float = 0.0
    failures: int = 0


@dataclass(slots=True)
class Process:
    """A worker, or a gateway (with an empty ``model``)."""

    name: str
    model: str = ""
    version: str = ""
    stage: int = 0
    phase: ProcessPhase = ProcessPhase.LAUNCHING
    # Monotonic time of launch, readiness or start of draining, whichever came last.
    since: float = 0.0
    # Start of its wait for other stages or a gateway; None: it does not wait.
    waited_at: float | None = None
    waited_s: float = 0.0  # total of such waits, which ``since`` excludes
    applied: int = 0  # number of the last routing table that it has applied
    # Number of the first routing table without this process as a target; senders that
    # have applied it send nothing more.
    drain_number: int = 0
    is_joined: bool = False  # its control world is ready
    is_drain_requested: bool = False
    options: str = ""  # digest of a gateway's options at its start
    probe: ProbeState = field(default_factory=lambda: ProbeState())
    # Hardware fingerprint on which its results depend; empty if unknown.
    fingerprint: str = ""
    weights: str = ""
    noise: str = ""  # name of its external engine's sampling method
    entered: dict[ProcessPhase, float] = field(default_factory=dict)

    @property
    def is_gateway(self) -> bool:
        return not self.model

    @property
    def is_going(self) -> bool:
        return self.phase in (ProcessPhase.DRAINING, ProcessPhase.FINISHING)

    @property
    def is_starting(self) -> bool:
        return self.phase in STARTING

    @property
    def is_there(self) -> bool:
        """True once it has joined its control world, and so can be reached."""
        return self.phase is not ProcessPhase.LAUNCHING
