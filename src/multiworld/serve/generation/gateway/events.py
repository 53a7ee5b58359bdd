"""Events that a stream router handles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.generation.gateway.stream import Stream
from multiworld.serve.transport.edge_messages import EdgeMessage
from multiworld.serve.transport.routing_table import RoutingTable


@dataclass(frozen=True, slots=True)
class Opened:
    """A client waits for the tokens of a new stream."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Closed:
    """A client no longer reads a stream, for whatever reason.

    Attributes:
        error: Why the stream ended early; None if it is complete.
    """

    number: int
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class TableChanged:
    """The controller sent another routing table."""

    table: RoutingTable


@dataclass(frozen=True, slots=True)
class Connected:
    """An edge to a replica is up."""

    replica: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """An edge to a replica is down.

    Attributes:
        is_polite: Whether the replica left; otherwise it was lost.
    """

    replica: str
    is_polite: bool


@dataclass(frozen=True, slots=True)
class Received:
    """Messages of one frame from a replica, in order."""

    replica: str
    messages: Sequence[EdgeMessage]


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed.

    Attributes:
        silent: Connected replicas that sent nothing lately.
        resumed_at: Monotonic time at which this process's last pause ended.
    """

    silent: frozenset[str]
    resumed_at: float


@dataclass(frozen=True, slots=True)
class TenantQuarantined:
    """Requests of a tenant to a model are refused from now on."""

    tenant: str
    model: str


Event = (
    Opened
    | Closed
    | TableChanged
    | Connected
    | Disconnected
    | Received
    | Ticked
    | TenantQuarantined
)
