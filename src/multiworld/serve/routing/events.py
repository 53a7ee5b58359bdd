"""What a router is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.errors import ServeError
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.routing_table import RoutingTable

Attempt = tuple[int, int]
"""Number of the request, number of the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A client wants an answer.

    Attributes:
        number: Of the request, growing.
        model: One that the table has a route for.
        session: Requests of one session go to the same replica.
        via: For a probe, replicas by stage that it must go through. It may go through
            others that are not ready, and is not refused for a full queue.
        share: Whose it is.
        rows: How much it takes of that share.
    """

    number: int
    model: str
    deadline_at: float
    session: str | None = None
    via: dict[int, str] | None = None
    share: Share = DEFAULT_SHARE
    rows: int = 1


@dataclass(frozen=True, slots=True)
class Begun:
    """A replica begins to compute these."""

    replica: str
    attempts: tuple[Attempt, ...]
    is_solo: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """What was handed on to a replica of ``stage`` may be lost with it, or was refused.

    Those that this stage has begun are not meant: its replica itself told of them.

    Attributes:
        is_innocent: Nothing died: it was refused, or there was nobody to hand it to.
    """

    attempts: tuple[Attempt, ...]
    stage: int
    is_returned: bool = False


@dataclass(frozen=True, slots=True)
class Stuck:
    """A replica handed these to another that has been silent since."""

    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer arrived, of perhaps several."""

    attempt: Attempt
    is_last: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The model raised for this request."""

    attempt: Attempt
    error: ServeError


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client has gone."""

    number: int


@dataclass(frozen=True, slots=True)
class TenantQuarantined:
    """Requests of a tenant have killed replicas of a model, again and again."""

    tenant: str
    model: str


@dataclass(frozen=True, slots=True)
class Connected:
    """The edge to a replica is up."""

    replica: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The edge to a replica has ended; ``is_polite``: it has left, nothing died."""

    replica: str
    is_polite: bool = False


@dataclass(frozen=True, slots=True)
class Silent:
    """A replica has given no sign for a fraction of a second, or does so again."""

    replica: str
    is_silent: bool


@dataclass(frozen=True, slots=True)
class TableChanged:
    """The controller has told a new table."""

    table: RoutingTable


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time to look at the deadlines."""


Event = (
    Submitted
    | Begun
    | Dropped
    | Stuck
    | Answered
    | Failed
    | Withdrawn
    | TenantQuarantined
    | Connected
    | Lost
    | Silent
    | TableChanged
    | Ticked
)
