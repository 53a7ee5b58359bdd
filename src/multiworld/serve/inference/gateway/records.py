"""Per-request and per-model state of a router. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from multiworld.serve.core.loss_ledger import REQUEST_RULE, LossLedger
from multiworld.serve.inference.gateway.events import Submitted
from multiworld.serve.tenants.fair_queue import FairQueue


@dataclass(slots=True)
class AttemptState:
    """One attempt of a request; ``is_done``: its replica began another batch since."""

    replica: str
    is_begun: bool = False
    is_isolated: bool = False
    is_done: bool = False


@dataclass(slots=True)
class Request:
    """A request that is not answered yet.

    Attributes:
        attempts: Attempts in flight, by attempt number.
        attempted: Attempts made so far; the number of the latest one.
        is_suspect: Whether it may be a poison request, so that it runs in isolation.
        winner: Number of the attempt whose answers are delivered.
    """

    job: Submitted
    attempts: dict[int, AttemptState] = field(default_factory=dict)
    attempted: int = 0
    is_waiting: bool = False
    is_suspect: bool = False
    losses: LossLedger = field(default_factory=lambda: LossLedger(REQUEST_RULE))
    winner: int | None = None


@dataclass(slots=True)
class Queue:
    """Waiting requests of one model.

    Attributes:
        probes: Probes skip the queue: queued requests may be waiting for the replica
            that a probe makes ready.
        unsent: Waiting requests that were never sent; load shedding counts these.
        isolated: Number of the suspect in flight; at most one at a time.
        isolated_until: End of isolation, in seconds of the router's clock, of each
            tenant that sent a poison request.
    """

    regular: FairQueue[int] = field(default_factory=FairQueue)
    suspects: FairQueue[int] = field(default_factory=FairQueue)
    probes: list[int] = field(default_factory=list)
    unsent: int = 0
    unsent_by_tenant: Counter[str] = field(default_factory=Counter)
    weights: dict[str, float] = field(default_factory=dict)
    isolated: int | None = None
    isolated_until: dict[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (len(self.regular) or len(self.suspects) or self.probes)
