"""Messages between the controller and the processes of a service. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import astuple

from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.tenants.usage_rows import TokensUsed, UsageRow
from multiworld.serve.wire.protocol import Codec, Message
from multiworld.serve.wire.routing_table import RoutingTable

Counted = tuple[str, tuple[str, ...], float]  # kind, labels, value since the start


# Orders: controller → process.


class ModelsChanged(Message, frozen=True, tag="models_changed"):
    """Controller → gateway: specs (JSON) of all served models, by name and version."""

    specs: dict[str, dict[str, str]]


class TableChanged(Message, frozen=True, tag="table_changed"):
    """Controller → process: a new routing table."""

    table: RoutingTable


class AllTenants(Message, frozen=True, tag="all_tenants"):
    """Controller → gateway: one part of the list of all tenants."""

    tenants: tuple[Tenant, ...]
    is_first: bool
    is_last: bool  # the previous list stays valid until the last part arrives


class TenantsChanged(Message, frozen=True, tag="tenants_changed"):
    """Controller → gateway: new or changed tenants, and names of removed ones."""

    tenants: tuple[Tenant, ...]
    removed: tuple[str, ...]


class BudgetsUsed(Message, frozen=True, tag="budgets_used"):
    """Controller → gateway: tokens used by tenants with budgets, over all gateways."""

    used: tuple[TokensUsed, ...]


class UsageStored(Message, frozen=True, tag="usage_stored"):
    """Controller → gateway: the usage batch with this number is on disk."""

    number: int


class ProbeReplica(Message, frozen=True, tag="probe_replica"):
    """Controller → gateway: probe this replica, and reply with ``ProbeResult``."""

    replica: str
    limit_s: float = 10.0


class Finish(Message, frozen=True, tag="finish"):
    """Controller → process: exit as soon as no work is left."""


class ReportRequest(Message, frozen=True, tag="report_request"):
    """Controller → process: reply with a ``Report`` of this number."""

    number: int
    has_counts: bool = False
    has_streams: bool = False  # a gateway includes its live streams


class CancelRequest(Message, frozen=True, tag="cancel_request"):
    """Controller → gateway: end the streams of a request, by its id.

    If ``number`` is given, reply with a ``Report`` of this number.
    """

    request: str
    number: int = 0


class InjectPartition(Message, frozen=True, tag="inject_partition"):
    """Controller → replica: simulate a network partition for this many seconds."""

    seconds: float


class InjectHang(Message, frozen=True, tag="inject_hang"):
    """Controller → replica: to simulate a hang, the replica sends itself SIGSTOP."""


# Upper bounds of the batch size histogram, in rows; a last bucket has no bound.
ROWS_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

# Upper bounds of the batch duration histogram, in seconds; a last bucket has no bound.
SECONDS_BOUNDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a replica at the time of the report."""

    queued: int = 0
    computing: int = 0
    probing: int = 0  # number of probes among the queued and computing requests
    computing_s: float = 0.0  # seconds since the current batch started
    waiting_for_next: int = 0  # outputs that wait for credit of the next stage
    handed: int = 0  # outputs sent to the next stage, which has not started on them
    computed_s: float = 0.0  # seconds of all batches so far
    counts: dict[str, int] = {}  # events since the start, by kind
    batch_rows: tuple[int, ...] = ()  # in the buckets of ``ROWS_BOUNDS``
    batch_seconds: tuple[int, ...] = ()  # in the buckets of ``SECONDS_BOUNDS``
    upstream: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()  # names of connected gateways
    downstream: tuple[str, ...] = ()
    cpu_s: float = 0.0
    memory_bytes: int = 0
    gpu_memory_bytes: int = 0
    kv_usage: float = 0.0  # used fraction of the memory for KV blocks
    kv_blocks: int = 0  # number of KV blocks; 0: unknown
    kv_block_tokens: int = 0  # number of tokens in a block
    phase: str = ""  # what a starting engine is doing; empty once it serves
    # Used share of all cores of its machine since the previous report, by any process;
    # negative: unknown.
    machine_busy: float = -1.0


class StreamShown(msgspec.Struct, frozen=True, array_like=True):
    """A live stream, for display to operators."""

    request: str  # id of the request
    number: int  # number of the stream at its gateway
    tenant: str
    model: str
    prompt: int  # number of prompt tokens
    made: int  # number of output tokens so far
    age_s: float
    phase: str
    chain: tuple[str, ...]  # replicas by stage; empty: none
    # Number of the current attempt, from 0; preparing replicas for a move also takes a
    # number.
    attempt: int
    # Number of losses that count against the stream; see ``LossLedger.counted``.
    losses: int
    longest_s: float = 0.0  # longest time between two tokens


class TenantLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests and streams of a tenant in progress at a gateway."""

    in_flight: int = 0
    waiting: int = 0  # those without a token or an answer
    structured: int = 0  # requests whose output has a grammar
    prompt_tokens: int = 0  # of the streams without a token


class ModelLoad(msgspec.Struct, frozen=True, array_like=True):
    """Requests for generated text that have no token yet, at a gateway."""

    waiting: int = 0
    prompt_tokens: int = 0  # of their streams
    compiling: int = 0  # those whose grammar is being compiled


Load = TypeVar("Load", TenantLoad, ModelLoad)


def summed(*found: Mapping[str, Load]) -> dict[str, Load]:
    """Return the sum of loads, by name."""
    sums: dict[str, Load] = {}
    for loads in found:
        for name, load in loads.items():
            before = sums.get(name)
            if before is None:
                sums[name] = load
                continue
            pairs = zip(astuple(before), astuple(load), strict=True)
            sums[name] = type(load)(*(a + b for a, b in pairs))
    return sums


class GatewayReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a gateway at the time of the report; counters start with the process."""

    in_flight: int = 0
    load: dict[str, int] = {}  # attempts in progress, by replica
    waiting: dict[str, int] = {}  # requests never sent to a replica, by model
    pending: dict[str, int] = {}  # requests that wait for their first or next attempt
    silent: tuple[str, ...] = ()
    connected: tuple[str, ...] = ()
    counts: dict[str, int] = {}
    arrived: dict[str, int] = {}
    attained: dict[str, int] = {}  # requests answered within the objective
    missed: dict[str, int] = {}  # late or given up; see ``Attainment.missed``
    refused: dict[str, int] = {}  # requests rejected because the queue was full
    # Number of ended completions; the next two fields count their tokens.
    completions: dict[str, int] = {}
    prompt_tokens: dict[str, int] = {}
    generated_tokens: dict[str, int] = {}
    cpu_s: float = 0.0
    tenants: dict[str, TenantLoad] = {}
    models: dict[str, ModelLoad] = {}
    # By model: how long its oldest request has waited for a first token or an answer.
    oldest_s: dict[str, float] = {}
    # If requested: some live streams, and the chains with the most streams.
    streams: tuple[StreamShown, ...] = ()
    chains: tuple[tuple[tuple[str, ...], int], ...] = ()


class Reports(msgspec.Struct, frozen=True):
    """Reports of all processes that replied, by name; with counts if requested."""

    workers: dict[str, WorkerReport] = {}
    gateways: dict[str, GatewayReport] = {}
    counted: dict[str, tuple[Counted, ...]] = {}


class FleetReport(Message, frozen=True, tag="fleet_report"):
    """Controller → gateway: reply to ``FleetReportRequest``; excludes the requester."""

    number: int = 0
    replicas: dict[str, WorkerReport] = {}  # noqa: RUF012 - msgspec copies it
    gateways: dict[str, GatewayReport] = {}  # noqa: RUF012
    others: tuple[Counted, ...] = ()
    slow: dict[str, str] = {}  # noqa: RUF012 - reason for each slow replica
    steps_s: dict[str, float] = {}  # noqa: RUF012 - seconds for a step, by replica
    # Model and number of each stage with a replica that fits on no machine; both are
    # empty for a gateway.
    unplaced: tuple[tuple[str, str], ...] = ()


class PoisonFound(Message, frozen=True, tag="poison_found"):
    """Gateway → controller → other gateways: a poison request, by input digest."""

    tenant: str
    model: str
    version: str
    digest: str
    age_s: float = 0.0  # seconds since the request was found to be poison


# Controller → process.
Order = (
    ModelsChanged
    | TableChanged
    | AllTenants
    | TenantsChanged
    | BudgetsUsed
    | UsageStored
    | ProbeReplica
    | Finish
    | ReportRequest
    | CancelRequest
    | InjectPartition
    | InjectHang
    | FleetReport
    | PoisonFound
)


# News: process → controller.


class Hello(Message, frozen=True, tag="hello"):
    """Process → controller: first message on a control world."""

    pid: int


class StageLoaded(Message, frozen=True, tag="stage_loaded"):
    """Process → controller: a replica has loaded its stage, or a gateway listens."""

    fingerprint: str = ""
    weights: str = ""
    identity: str = ""  # name of the version's identity; empty: unknown
    changed: str = ""  # a changed file of the version; its unchanged copy was loaded
    noise: str = ""  # random source of an external engine; see ``WholeEngine.noise``


class TableApplied(Message, frozen=True, tag="table_applied"):
    """Process → controller: the routing table of this number has been applied."""

    number: int


class Report(Message, frozen=True, tag="report"):
    """Process → controller: reply to the order of this number; 0: sent at exit."""

    number: int
    worker: WorkerReport | None = None
    gateway: GatewayReport | None = None
    counted: tuple[Counted, ...] = ()
    cancelled: int = 0  # streams that ``CancelRequest`` has ended


class FleetReportRequest(Message, frozen=True, tag="fleet_report_request"):
    """Gateway → controller: request for a ``FleetReport``."""

    number: int


class UsageReport(Message, frozen=True, tag="usage_report"):
    """Gateway → controller: batch ``number`` of the usage meter ``meter``."""

    meter: str
    number: int
    rows: tuple[UsageRow, ...]


class ModelNeeded(Message, frozen=True, tag="model_needed"):
    """Gateway → controller: a request needs a model that lacks replicas of a stage."""

    model: str


class MemoryExceeded(Message, frozen=True, tag="memory_exceeded"):
    """Replica → controller: the replica uses more memory (in bytes) than it booked."""

    used: int
    limit: int


class ProbeResult(Message, frozen=True, tag="probe_result"):
    """Gateway → controller: result of a probe; ``error`` is None if it succeeded."""

    replica: str
    error: str | None = None


# Process → controller.
News = (
    Hello
    | StageLoaded
    | TableApplied
    | Report
    | FleetReportRequest
    | UsageReport
    | ModelNeeded
    | MemoryExceeded
    | ProbeResult
    | PoisonFound
)

ORDERS: Codec[Order] = Codec(Order)
NEWS: Codec[News] = Codec(News)
