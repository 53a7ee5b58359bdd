"""Per-request and per-model state of a router. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from multiworld.serve.gateway.requests.events import Submitted
from multiworld.serve.queueing.fair_queue import FairQueue
from multiworld.serve.queueing.queue_limits import WaitingTenants
from multiworld.serve.routing.poison_rules import REQUEST_RULE, LossLedger


@dataclass(slots=True)
class AttemptState:
    """One attempt; ``is_done``: its replica has since begun another batch."""

    replica: str
    is_begun: bool = False
    is_isolated: bool = False
    is_done: bool = False

    @property
    def is_computed(self) -> bool:
        return self.is_begun and not self.is_done


@dataclass(slots=True)
class Request:
    """A request that has not been answered."""

    job: Submitted
    # Attempts in flight, by number.
    attempts: dict[int, AttemptState] = field(default_factory=dict)
    attempted: int = 0  # number of the latest attempt
    is_waiting: bool = False
    is_suspect: bool = False  # may be poison: runs in isolation
    losses: LossLedger = field(default_factory=lambda: LossLedger(REQUEST_RULE))


@dataclass(slots=True)
class Queue:
    """Waiting requests of one model."""

    regular: FairQueue[int] = field(default_factory=FairQueue)
    suspects: FairQueue[int] = field(default_factory=FairQueue)
    # Probes skip the queue: queued requests may be waiting for the replica that a probe
    # makes ready.
    probes: list[int] = field(default_factory=list)
    # Waiting requests that were never sent; load shedding counts these.
    unsent: WaitingTenants = field(default_factory=WaitingTenants)
    isolated: int | None = None  # the suspect in flight; at most one
    # End of isolation, on the router's clock, by tenant that sent a poison request.
    isolated_until: dict[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (len(self.regular) or len(self.suspects) or self.probes)
