"""The facts of a running service, which every view shows. Pure.

Rates are of the last ten seconds, quantiles of the last minute.
"""

from __future__ import annotations

import msgspec

from multiworld.serve.controller.answers import NodeShown
from multiworld.serve.controller.fleet.entries import Assessment, HistoryEntry


class Spread(msgspec.Struct, frozen=True):
    """Median and 99th percentile, in seconds."""

    p50: float
    p99: float


class StageFacts(msgspec.Struct, frozen=True):
    name: str
    wanted: int  # replicas
    replicas: tuple[str, ...]  # names


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a model, and how it answers."""

    version: str  # that serves
    stages: tuple[StageFacts, ...]
    requests_s: float = 0.0  # answered, per second
    failures_s: float = 0.0  # answered with an error, per second
    tokens_s: float = 0.0
    in_flight: int = 0
    waiting: int = 0  # at the gateways
    answers: Spread | None = None
    first_tokens: Spread | None = None
    between_tokens: Spread | None = None
    kv_usage: float = 0.0  # of the fullest replica, from 0 to 1
    # Share of prompt tokens found in prefix caches of late; None: no prompt came.
    prefix_hits: float | None = None
    # The chains with most streams, as the replicas by stage, and their numbers.
    chains: tuple[tuple[tuple[str, ...], int], ...] = ()
    bottleneck: str = ""  # what keeps it from answering more; empty: nothing


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: str
    stage: int
    phase: str
    since_s: float  # in its phase
    pid: int | None
    node: str
    load: int = 0  # requests and streams that gateways have there
    queued: int = 0
    computing: int = 0
    kv_usage: float = 0.0  # from 0 to 1
    memory_bytes: int = 0
    booked_memory_bytes: int = 0
    cores: float = 0.0  # processors that it keeps busy
    step_s: float | None = None  # seconds for a step; None: it has computed little
    busy: float = 0.0  # share of the time in which it computes
    slow: str = ""  # why it is said to be slow; empty: it is not
    is_silent: bool = False  # to a gateway
    next: tuple[str, ...] = ()  # replicas that it is connected to
    note: str = ""  # what a starting engine does
    log: str = ""


class GatewayFacts(msgspec.Struct, frozen=True, kw_only=True):
    phase: str
    since_s: float
    pid: int | None
    in_flight: int = 0
    waiting: int = 0
    cores: float = 0.0
    log: str = ""


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A live stream. ``began_at`` stays, so that little of it changes."""

    request: str  # id
    gateway: str
    tenant: str
    model: str
    prompt: int  # tokens
    made: int  # tokens so far
    began_at: float  # epoch seconds
    phase: str
    chain: tuple[str, ...]  # replicas by stage
    attempt: int
    losses: int
    longest_s: float  # longest time between two tokens


class TenantFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant asks for, and is refused."""

    requests_s: float = 0.0
    refused_s: dict[str, float] = {}  # by reason
    refused: dict[str, float] = {}  # since the service started
    # Tokens of its budgets, by the name of the limit: used, and allowed.
    budgets: dict[str, tuple[int, int]] = {}


class Point(msgspec.Struct, frozen=True, array_like=True):
    """The load of a model at a time."""

    at: float  # epoch seconds
    requests_s: float
    tokens_s: float
    in_flight: int
    p99: float  # of answers, in seconds; 0: there was none
    first_p99: float  # of first tokens
    kv_usage: float = 0.0  # of the fullest replica, from 0 to 1
    prefix_hits: float = 0.0  # share of prompt tokens; 0: there was no prompt


class Series(msgspec.Struct, frozen=True):
    """What the load was, by model; the oldest point first."""

    models: dict[str, tuple[Point, ...]]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of a service."""

    app: str
    url: str
    at: float  # epoch seconds
    is_ready: bool
    controller: int
    trouble: str
    models: dict[str, ModelFacts]
    replicas: dict[str, ReplicaFacts]
    gateways: dict[str, GatewayFacts]
    tenants: dict[str, TenantFacts]  # those that were seen, by name; "": no valid key
    nodes: dict[str, NodeShown]
    events: tuple[HistoryEntry, ...]
    thoughts: tuple[Assessment, ...]
    streams: dict[str, StreamFacts] = {}  # some of those that run
    # What has happened to streams and requests since the service started.
    tokens: int = 0
    replayed: int = 0  # streams and requests that went on after a loss
    moved: int = 0  # streams, ahead of time
    cut: int = 0  # streams
    handed_over: int = 0  # connections, to another gateway
    unplaced: dict[str, str] = {}
    failing: dict[str, str] = {}
