"""The facts of a running service, which every view shows. Pure.

Rates cover the last ten seconds, quantiles the last minute.
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
    wanted: int  # desired number of replicas
    replicas: tuple[str, ...]  # names


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Load, latencies and bottleneck of a model."""

    version: str  # the active one
    stages: tuple[StageFacts, ...]
    requests_s: float = 0.0  # requests answered per second
    failures_s: float = 0.0  # requests answered with an error per second
    # Requests per second that the service failed to answer, by HTTP status.
    failed_s: dict[str, float] = {}
    tokens_s: float = 0.0
    in_flight: int = 0
    waiting: int = 0  # requests that wait at the gateways
    # How long its oldest request has waited for a first token or an answer.
    oldest_s: float = 0.0
    answers: Spread | None = None
    queue: Spread | None = None  # until the first step of a prompt
    first_tokens: Spread | None = None
    between_tokens: Spread | None = None
    kv_usage: float = 0.0  # of the fullest replica, from 0 to 1
    # Share of recent prompt tokens found in prefix caches; None: no prompt arrived.
    prefix_hits: float | None = None
    # The replica chains with the most streams: for each, its replicas by stage, and its
    # number of streams.
    chains: tuple[tuple[tuple[str, ...], int], ...] = ()
    bottleneck: str = ""  # cause that limits its throughput; empty: none


class ReplicaFacts(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    version: str
    stage: int
    phase: str
    since_s: float  # seconds in its current phase
    pid: int | None
    node: str
    load: int = 0  # requests and streams that gateways have at this replica
    queued: int = 0
    computing: int = 0
    kv_usage: float = 0.0  # from 0 to 1
    memory_bytes: int = 0
    booked_memory_bytes: int = 0
    cores: float = 0.0  # CPU seconds per second
    step_s: float | None = None  # seconds for a step; None: too few steps to measure
    busy: float = 0.0  # share of the time in which it computes
    slow: str = ""  # reason why it counts as slow; empty: it does not
    is_silent: bool = False  # True if a gateway does not hear from it
    next: tuple[str, ...] = ()  # replicas of the next stage that it is connected to
    note: str = ""  # progress of a starting engine
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
    """A live stream; ``began_at`` is constant, which keeps patches small."""

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
    """Requests, refusals and budgets of a tenant."""

    requests_s: float = 0.0
    in_flight: int = 0  # requests and streams
    waiting: int = 0  # those without a token or an answer
    structured: int = 0  # requests whose output has a grammar
    prompt_tokens: int = 0  # of the streams without a token
    refused_s: dict[str, float] = {}  # refusals per second, by reason
    refused: dict[str, float] = {}  # refusals since the service started, by reason
    # Tokens used and allowed, by the name of the budget's limit.
    budgets: dict[str, tuple[int, int]] = {}


class Point(msgspec.Struct, frozen=True, array_like=True):
    """The load of a model at a time."""

    at: float  # epoch seconds
    requests_s: float
    tokens_s: float
    in_flight: int  # attempts in progress at replicas of stage 0
    p99: float  # 99th percentile of the seconds to an answer; 0: no answer
    first_p99: float  # 99th percentile of the seconds to the first token; 0: no token
    kv_usage: float = 0.0  # of the fullest replica, from 0 to 1
    # Share of prompt tokens found in prefix caches; 0: no prompt arrived.
    prefix_hits: float = 0.0


class Series(msgspec.Struct, frozen=True):
    """The load of each model over time; the oldest point first."""

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
    # Tenants with requests, by name; "": requests without a valid key.
    tenants: dict[str, TenantFacts]
    nodes: dict[str, NodeShown]
    events: tuple[HistoryEntry, ...]
    thoughts: tuple[Assessment, ...]
    streams: dict[str, StreamFacts] = {}  # some of the live streams
    # Counts since the service started.
    tokens: int = 0
    replayed: int = 0  # streams and requests that continued after a loss
    moved: int = 0  # streams moved from a running replica to another
    cut: int = 0  # streams cut off
    handed_over: int = 0  # connections that another gateway has continued
    unplaced: dict[str, str] = {}
    failing: dict[str, str] = {}
    # Used share of the cores of each machine, by any process.
    busy: dict[str, float] = {}
    # The program outside the service that uses most of the controller's machine, if it
    # has no free core: its name, process ids and cores.
    neighbour: str = ""
    # Free and total bytes of the file system that has the service's state and logs.
    disk: tuple[int, int] = (0, 0)
    # Stages whose replicas all compute more slowly than before, and by how much.
    slower: dict[str, str] = {}
    # Sentences about what is wrong now, the worst first; see ``troubles_of``.
    troubles: tuple[str, ...] = ()
