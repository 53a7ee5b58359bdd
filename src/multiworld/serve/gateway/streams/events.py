"""Events that a stream router handles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.gateway.streams.stream import Stream
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.routing_table import RoutingTable


@dataclass(frozen=True, slots=True)
class Opened:
    stream: Stream  # a client waits for its tokens


@dataclass(frozen=True, slots=True)
class Closed:
    number: int  # number of a stream that its client no longer reads
    error: BaseException | None = None  # why the stream ended early; None: complete


@dataclass(frozen=True, slots=True)
class TableChanged:
    table: RoutingTable


@dataclass(frozen=True, slots=True)
class Connected:
    replica: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    replica: str
    is_polite: bool  # True: the replica left; False: it was lost


@dataclass(frozen=True, slots=True)
class Received:
    replica: str
    messages: Sequence[EdgeMessage]  # messages of one frame, in order


@dataclass(frozen=True, slots=True)
class Ticked:
    silent: frozenset[str]  # connected replicas that sent nothing for ``SILENT_S``
    resumed_at: float  # monotonic time at which this process's last pause ended


@dataclass(frozen=True, slots=True)
class TenantQuarantined:
    tenant: str  # tenant whose requests to the model are refused from now on
    model: str


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    request: str  # id of the request whose streams an operator ends


Event = (
    Opened
    | Closed
    | TableChanged
    | Connected
    | Disconnected
    | Received
    | Ticked
    | TenantQuarantined
    | RequestCancelled
)
