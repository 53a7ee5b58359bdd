"""Prometheus metrics of a service.

Counters without the label ``replica`` or ``process`` are sums over all processes,
including processes that have exited. Other counters, and gauges, are per process.
"""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

import multiworld
from multiworld.serve.gateway.http.request_counts import ENDS
from multiworld.serve.gateway.http.vllm_metrics import vllm_families
from multiworld.serve.gateway.streams.stream_counts import ENDS as STREAM_ENDS
from multiworld.serve.spec.dedicated import is_dedicated
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire.routing_table import ReplicaState, RoutingTable

Sums = Mapping[tuple[str, tuple[str, ...]], float]  # counts, by kind and labels

OF_STAGE = ("model", "version", "stage")

OF_REPLICA = (*OF_STAGE, "replica")

OF_WORK = {
    "requests": "Requests computed.",
    "failed": "Requests for which the model raised an error.",
    "cancelled": "Requests that were not computed because the client hung up.",
    "dropped": "Requests that may have been lost with a replica of the next stage; the "
    "gateway replays them.",
    "stuck": "Requests sent to a replica of the next stage that became silent; the "
    "gateway hedges them.",
    "returned": "Requests returned because the next stage had no replica; the gateway "
    "replays them.",
    "preemptions": "Sequences computed again because there was no memory for their "
    "keys and values.",
    "evicted": "Sequences that a replica had no memory for; stage 0 computes them "
    "again later.",
    "refilled": "Tokens computed for KV rebuilds after the loss of a replica.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
# Help text and labels of each counter, by kind.
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "requests": (
        "Requests answered, by HTTP status. 499: the client hung up. The model is "
        "'unknown' if there is no such model, or the key is not valid.",
        ("model", "status"),
    ),
    "phase_seconds": (
        "Seconds of the requests answered with 200 (as in multiworld_request_seconds), "
        "by phase: parse, queue, hop, compute, render.",
        ("model", "phase"),
    ),
    "attained": (
        "Requests answered within the model's objective_ms; all answered requests if "
        "the model has no objective.",
        ("model",),
    ),
    "missed": (
        "Requests answered late, abandoned, or refused by a full queue.",
        ("model",),
    ),
    "fleet_events": (
        "Events of the service since the controller started, by kind. Model and stage "
        "(its number) are empty where an event has none.",
        ("kind", "model", "stage"),
    ),
    "router_events": (
        "Requests with one answer, by kind of event: answered, replayed, or the class "
        "of an error, such as NoReplicaError.",
        ("kind",),
    ),
    "stream_events": (
        "Events of streams, by kind. tokens: delivered tokens; replayed: attempts "
        "repeated after a failure; moved: streams that moved to another chain while "
        "their old one still ran; given_up: abandoned moves, which are retried later; "
        "cut: streams that ended with an error after their first token; other_kind: "
        "streams that continued on hardware with another fingerprint.",
        ("kind",),
    ),
    "completions": ("Completions that have ended.", ("model",)),
    "prompt_tokens": ("Tokens of the prompts of ended streams.", ("model",)),
    "generation_tokens": ("Tokens generated in ended streams.", ("model",)),
    "refused": (
        "Requests refused at admission, by tenant (empty: no valid key) "
        "and reason: no or wrong key, suspended, not an operator, model, rpm_limit, "
        "max_parallel_requests, bytes_per_s, tpm_limit, tokens_per_day, "
        "tokens_per_month, quarantined, poisonous.",
        ("tenant", "why"),
    ),
    "tenant_requests": (
        "Requests of a tenant, by HTTP status.",
        ("tenant", "model", "status"),
    ),
    "tenant_seconds": (
        "Total seconds of the tenant's requests that were answered with 200.",
        ("tenant", "model"),
    ),
    **{f"stage_{what}": (text, OF_STAGE) for what, text in OF_WORK.items()},
    "stage_rows": ("Rows computed.", OF_STAGE),
    "stage_batches": ("Batches computed; not for models that generate text.", OF_STAGE),
    "stage_seconds": ("Seconds spent computing batches.", OF_STAGE),
}

GAUGES = {
    "queued": "Requests that wait to be computed.",
    "computing": "Requests in the batch being computed.",
    "waiting_for_next": "Outputs that wait for room at the next stage. If it stays "
    "above 0, the next stage is the bottleneck.",
    "kv_usage": "Stage 0 of a model that generates text: share of the memory for keys "
    "and values in use, from 0 to 1.",
}


def render(
    sums: Sums,
    gateways: Mapping[str, messages.GatewayReport],
    fleet: messages.FleetReport,
    table: RoutingTable,
) -> bytes:
    return generate_latest(_Families(_families(sums, gateways, fleet, table)))


class _Families(Collector):
    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families


def _families(
    sums: Sums,
    gateways: Mapping[str, messages.GatewayReport],
    fleet: messages.FleetReport,
    table: RoutingTable,
) -> Iterator[Metric]:
    yield _build_info()
    yield from ProcessCollector(registry=None).collect()  # metrics of this process
    counters = {
        kind: CounterMetricFamily(f"multiworld_{kind}", text, labels=labels)
        for kind, (text, labels) in COUNTERS.items()
    }
    for (kind, values), value in sums.items():
        if kind in counters:
            counters[kind].add_metric(values, value)
    yield from counters.values()
    yield from _latencies(sums)
    yield from _gateways(gateways, table)
    yield from _stages(table)
    yield _unplaced(fleet)
    yield from _replicas(fleet.replicas, table)
    yield from _paces(fleet, table)
    kinds = (*HISTOGRAMS, "queue", "prefill", "inter_token", "decode")
    ends = {what: ENDS if what == "request" else STREAM_ENDS for what in kinds}
    yield from vllm_families(sums, gateways, fleet.replicas, table, ends)
    cpu = CounterMetricFamily(
        "multiworld_process_cpu_seconds",
        "CPU time of a gateway or replica.",
        labels=["process"],
    )
    for name, gateway in gateways.items():
        cpu.add_metric([name], gateway.cpu_s)
    for name, replica in fleet.replicas.items():
        cpu.add_metric([name], replica.cpu_s)
    yield cpu


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"multiworld_{name}", text, labels=labels)


def _build_info() -> Metric:
    text = "Always 1; versions of the gateway that was scraped."
    info = _gauge("build_info", text, "version", "python", "torch")
    python = platform.python_version()
    info.add_metric([multiworld.__version__, python, torch.__version__], 1.0)
    return info


# Name and help text of each histogram, by the prefix of its counts.
HISTOGRAMS = {
    "request": (
        "request_seconds",
        "Seconds from the headers of a request to its answer, or to the end of its "
        "stream, for requests answered with 200. The time that the body takes to "
        "arrive is included.",
    ),
    "first_token": (
        "time_to_first_token_seconds",
        "Seconds from the acceptance of a stream to its first token.",
    ),
    "output_token": (
        "time_per_output_token_seconds",
        "Mean seconds between two tokens of a stream.",
    ),
}


def _latencies(sums: Sums) -> Iterator[Metric]:
    for what, (name, text) in HISTOGRAMS.items():
        ends = ENDS if what == "request" else STREAM_ENDS
        histogram = HistogramMetricFamily(f"multiworld_{name}", text, labels=["model"])
        for (kind, labels), seconds in sums.items():
            if kind == f"{what}_seconds":
                counts = [
                    sums.get((f"{what}_buckets", (*labels, end)), 0) for end in ends
                ]
                buckets = list(zip(ends, itertools.accumulate(counts), strict=True))
                histogram.add_metric(labels, buckets, seconds)
        yield histogram


def _gateways(
    gateways: Mapping[str, messages.GatewayReport], table: RoutingTable
) -> Iterator[Metric]:
    of_one = ("gateway", *OF_REPLICA)
    in_flight = _gauge(
        "in_flight", "Requests accepted and not yet answered.", "gateway"
    )
    text = "Requests that wait at the gateway for a replica with room."
    waiting = _gauge("waiting", text, "gateway", "model")
    text = "Attempts of a gateway that are in flight at a replica."
    held = _gauge("replica_in_flight", text, *of_one)
    text = "1 while the replica is silent; its requests are hedged elsewhere."
    silent = _gauge("replica_silent", text, *of_one)
    text = "How long the oldest request has waited for a first token or an answer."
    oldest = _gauge("oldest_request_seconds", text, "gateway", "model")
    text = "Requests and streams of a tenant in progress."
    of_tenant = _gauge("tenant_in_flight", text, "gateway", "tenant")
    text = "Prompt tokens of a tenant's streams that have no token yet."
    asked = _gauge("tenant_waiting_prompt_tokens", text, "gateway", "tenant")
    for gateway, report in gateways.items():
        for model in report.waiting:
            oldest.add_metric([gateway, model], report.oldest_s.get(model, 0.0))
        for tenant, load in report.tenants.items():
            of_tenant.add_metric([gateway, tenant], load.in_flight)
            asked.add_metric([gateway, tenant], load.prompt_tokens)
        in_flight.add_metric([gateway], report.in_flight)
        for model, count in report.waiting.items():
            waiting.add_metric([gateway, model], count)
        for name in report.connected:
            labels = [gateway, *_labels(name, table)]
            held.add_metric(labels, report.load.get(name, 0))
            silent.add_metric(labels, float(name in report.silent))
    yield from (in_flight, waiting, oldest, of_tenant, asked, held, silent)


def _stages(table: RoutingTable) -> Iterator[Metric]:
    labels = ("model", "version", "stage", "state")
    gauge = _gauge(
        "stage_replicas",
        "Replicas of a stage, by state; 0 where there are none.",
        *labels,
    )
    found = Counter(
        (each.model, each.version, each.stage, each.state)
        for each in table.replicas.values()
    )
    stages = [
        (name, version, stage)
        for name, route in table.routes.items()
        for version, count in route.stages.items()
        for stage in range(count)
    ]
    for model, version, stage in stages:
        for state in ReplicaState:
            values = [model, version, str(stage), state.value]
            gauge.add_metric(values, found[model, version, stage, state])
    yield gauge
    missing = _gauge(
        "stage_missing",
        "1 while the version that serves has no ready replica of a stage, unless the "
        "stage may scale to zero.",
        "model",
        "stage",
    )
    for model, route in table.routes.items():
        if is_dedicated(model):
            continue
        for stage in range(route.stages.get(route.version, 0)):
            is_ready = found[model, route.version, stage, ReplicaState.READY] > 0
            is_missing = not is_ready and stage not in route.on_demand
            missing.add_metric([model, str(stage)], float(is_missing))
    yield missing


def _unplaced(fleet: messages.FleetReport) -> Metric:
    text = (
        "1 while a replica of the stage finds no machine with room; both labels are "
        "empty for a gateway. Absent otherwise."
    )
    gauge = _gauge("stage_unplaced", text, "model", "stage")
    for model, stage in fleet.unplaced:
        gauge.add_metric([model, stage], 1.0)
    return gauge


def _replicas(
    reports: Mapping[str, messages.WorkerReport], table: RoutingTable
) -> Iterator[Metric]:
    for what, text in OF_WORK.items():
        counter = CounterMetricFamily(
            f"multiworld_replica_{what}", text, labels=OF_REPLICA
        )
        for name, report in reports.items():
            counter.add_metric(_labels(name, table), report.counts.get(what, 0))
        yield counter
    for what, text in GAUGES.items():
        gauge = _gauge(f"replica_{what}", text, *OF_REPLICA)
        for name, report in reports.items():
            gauge.add_metric(_labels(name, table), float(getattr(report, what)))
        yield gauge
    text = "Rows per batch. Models that generate text have no batches, but steps."
    sizes = HistogramMetricFamily("multiworld_batch_rows", text, labels=OF_REPLICA)
    text = "Seconds per batch. Models that generate text have no batches, but steps."
    times = HistogramMetricFamily("multiworld_batch_seconds", text, labels=OF_REPLICA)
    for name, report in reports.items():
        if not report.batch_rows:
            continue  # its model generates text: it has steps instead of batches
        labels, rows = _labels(name, table), report.counts.get("rows", 0)
        sizes.add_metric(
            labels, _buckets(messages.ROWS_BOUNDS, report.batch_rows), rows
        )
        seconds = _buckets(messages.SECONDS_BOUNDS, report.batch_seconds)
        times.add_metric(labels, seconds, report.computed_s)
    yield sizes
    yield times


def _paces(fleet: messages.FleetReport, table: RoutingTable) -> Iterator[Metric]:
    text = "Mean seconds of the latest steps or batches."
    steps = _gauge("replica_step_seconds", text, *OF_REPLICA)
    text = (
        "1 while a replica is slower than its peers and than before; multiworld "
        "explain shows by how much, and whether the replica lacks CPU time."
    )
    slow = _gauge("replica_slow", text, *OF_REPLICA)
    for name, seconds in fleet.steps_s.items():
        steps.add_metric(_labels(name, table), seconds)
    for name in fleet.replicas:
        slow.add_metric(_labels(name, table), float(name in fleet.slow))
    yield from (steps, slow)


def _labels(name: str, table: RoutingTable) -> list[str]:
    replica = table.replicas.get(name)
    if replica is None:
        return ["", "", "", name]
    return [replica.model, replica.version, str(replica.stage), name]


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return a histogram's cumulative buckets, as Prometheus expects them."""
    ends = [f"{bound:g}" for bound in bounds] + ["+Inf"]
    sums = itertools.accumulate(counts or [0] * len(ends))
    return list(zip(ends, map(float, sums), strict=True))
