"""Events that a router handles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.wire.inference_messages import Attempt, Note
from multiworld.serve.wire.routing_table import RoutingTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    number: int  # increases with each request
    model: str
    deadline_at: float  # on the router's clock
    session: str | None = None
    # For a probe: replicas through which it must pass, by stage. A probe may also pass
    # other replicas that are not ready, and a full queue does not refuse it.
    via: dict[int, str] | None = None
    share: Share = DEFAULT_SHARE
    rows: int = 1  # cost in fair queueing
    # Model version against which the request was checked; empty: any version.
    version: str = ""
    is_resumed: bool = False  # another gateway has admitted it, so no queue refuses it


@dataclass(frozen=True, slots=True)
class Received:
    """A replica's note about requests."""

    replica: str
    note: Note


@dataclass(frozen=True, slots=True)
class Answered:
    """The arrival of an answer, or of its last part."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A request whose client gave up or disconnected."""

    number: int


@dataclass(frozen=True, slots=True)
class TenantQuarantined:
    """A tenant that is quarantined for a model after several poison requests."""

    tenant: str
    model: str


@dataclass(frozen=True, slots=True)
class Connected:
    replica: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The end of the edge to a replica; ``is_polite``: it left and was not lost."""

    replica: str
    is_polite: bool = False


@dataclass(frozen=True, slots=True)
class Silent:
    """A replica whose heartbeats stopped for ``SILENT_S``, or resumed."""

    replica: str
    is_silent: bool


@dataclass(frozen=True, slots=True)
class TableChanged:
    table: RoutingTable


@dataclass(frozen=True, slots=True)
class Ticked:
    """A tick of the timer that checks deadlines."""


Event = (
    Submitted
    | Received
    | Answered
    | Withdrawn
    | TenantQuarantined
    | Connected
    | Lost
    | Silent
    | TableChanged
    | Ticked
)
