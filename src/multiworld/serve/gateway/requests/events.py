"""Events that a router handles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.wire.inference_messages import Attempt, Note
from multiworld.serve.wire.routing_table import RoutingTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    number: int  # later requests have higher ones
    model: str
    deadline_at: float  # on the router's clock
    session: str | None = None
    # Of a probe: replicas by stage that it must pass. It may use others that are not
    # ready, and a full queue does not refuse it.
    via: dict[int, str] | None = None
    share: Share = DEFAULT_SHARE
    rows: int = 1  # its cost in fair queueing
    version: str = ""  # that it was checked against; empty: any may compute it


@dataclass(frozen=True, slots=True)
class Received:
    """A replica reports what happens to requests."""

    replica: str
    note: Note


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a request arrived, or the last part of it."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client gave up or disconnected."""

    number: int


@dataclass(frozen=True, slots=True)
class TenantQuarantined:
    """A tenant is quarantined for a model because of several poison requests."""

    tenant: str
    model: str


@dataclass(frozen=True, slots=True)
class Connected:
    replica: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The edge to a replica ended; ``is_polite``: it left, it did not die."""

    replica: str
    is_polite: bool = False


@dataclass(frozen=True, slots=True)
class Silent:
    """A replica's heartbeats stopped for a fraction of a second, or resumed."""

    replica: str
    is_silent: bool


@dataclass(frozen=True, slots=True)
class TableChanged:
    table: RoutingTable


@dataclass(frozen=True, slots=True)
class Ticked:
    """The timer for checking deadlines fired."""


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
