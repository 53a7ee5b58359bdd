"""What a router keeps of a request, and of those that wait. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from multiworld.serve.routing.events import Submitted
from multiworld.serve.tenants.fair_queue import FairQueue


@dataclass(slots=True)
class AttemptState:
    """One attempt of a request: where it is."""

    replica: str
    is_begun: bool = False
    is_solo: bool = False
    is_done: bool = False
    """The replica has begun others since: this one it had ended."""


@dataclass(slots=True)
class Request:
    """One request that is not answered.

    Attributes:
        strikes: Replicas that died while they computed it alone.
        losses: Replicas that died with it in their queue.
        winner: The attempt whose answers are delivered.
    """

    job: Submitted
    attempts: dict[int, AttemptState] = field(default_factory=dict)
    attempted: int = 0
    is_waiting: bool = False
    is_suspect: bool = False
    isolated_losses: int = 0
    queued_losses: int = 0
    winner: int | None = None


@dataclass(slots=True)
class Queue:
    """Requests of one model that wait."""

    regular: FairQueue[int] = field(default_factory=FairQueue)
    suspects: FairQueue[int] = field(default_factory=FairQueue)
    probes: list[int] = field(default_factory=list)
    """They wait behind nobody: what others wait for may be ready by them only."""
    unsent: int = 0
    """How many wait that were never sent."""
    unsent_by_tenant: Counter[str] = field(default_factory=Counter)
    """The same, by tenant."""
    weights: dict[str, float] = field(default_factory=dict)
    """Of the tenants that have any."""
    isolated: int | None = None
    """The suspect that is under way."""
    isolated_until: dict[str, float] = field(default_factory=dict)
    """Tenants of requests that were found poisonous, and until when they count so."""
