"""Metrics with vLLM's names, for dashboards and schedulers that expect them. Pure.

The metrics are defined as in vLLM (docs/design/metrics.md there, v1 engine), but for a
whole model in place of one engine. Metrics that cannot be measured here are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from multiworld.serve.wire.control_messages import GatewayReport, WorkerReport
from multiworld.serve.wire.routing_table import RoutingTable

Sums = Mapping[tuple[str, tuple[str, ...]], float]  # counts, by kind and labels

LABELS = ("model_name", "engine")
ENGINE = "0"  # label ``engine``: clients see a model as one engine

# Kind of multiworld's count, and help text, by vLLM's metric name.
COUNTERS = {
    "prompt_tokens": (
        "prompt_tokens",
        "Prompt tokens of ended requests. vLLM counts them while they run.",
    ),
    "generation_tokens": (
        "generation_tokens",
        "Tokens generated in ended requests. vLLM counts them while they run.",
    ),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "first_token",
        "Seconds from the acceptance of a request to its first token.",
    ),
    "request_queue_time_seconds": (
        "queue",
        "Seconds from the acceptance of a request to the first step of its prompt.",
    ),
    "request_prefill_time_seconds": (
        "prefill",
        "Seconds from the first step of a request's prompt to its first token.",
    ),
    "request_time_per_output_token_seconds": (
        "output_token",
        "Mean seconds between two tokens of a request.",
    ),
    "inter_token_latency_seconds": (
        "inter_token",
        "Seconds between two tokens of a request, as they arrive at the gateway.",
    ),
    "request_decode_time_seconds": (
        "decode",
        "Seconds from the first to the last token of a request.",
    ),
    "e2e_request_latency_seconds": (
        "request",
        "Seconds from a request's headers to the end of its answer.",
    ),
}


def vllm_families(
    sums: Sums,  # of all gateways
    gateways: Mapping[str, GatewayReport],  # by name
    replicas: Mapping[str, WorkerReport],  # by name
    table: RoutingTable,
    ends: Mapping[str, Sequence[str]],  # bounds of buckets, by kind of histogram
) -> Iterator[Metric]:
    """Yield the metrics of models that generate text."""
    counted = {labels[0] for kind, labels in sums if kind == "completions"}
    routed = {name for name, route in table.routes.items() if route.generates}
    models = sorted(counted | routed)
    first = {
        model: [
            report
            for name, report in replicas.items()
            if (r := table.replicas.get(name)) and (r.model, r.stage) == (model, 0)
        ]
        for model in models
    }
    running = _gauge("num_requests_running", "Requests that are being computed.")
    waiting = _gauge(
        "num_requests_waiting", "Requests that wait, at gateways and replicas."
    )
    text = "Used fraction of the KV memory, from 0 to 1; mean over replicas of stage 0."
    usage = _gauge("kv_cache_usage_perc", text)
    text = "Always 1; size of the KV memory, as the sum of the replicas of stage 0."
    sizes = ("block_size", "num_gpu_blocks")
    config = GaugeMetricFamily("vllm:cache_config_info", text, labels=(*LABELS, *sizes))
    for model, reports in first.items():
        label = model, ENGINE
        running.add_metric(label, sum(each.computing for each in reports))
        queued = sum(each.queued for each in reports)
        held = sum(each.waiting.get(model, 0) for each in gateways.values())
        waiting.add_metric(label, queued + held)
        used = [each.kv_usage for each in reports]
        usage.add_metric(label, sum(used) / len(used) if used else 0.0)
        blocks = sum(each.kv_blocks for each in reports)
        if blocks:  # external engines do not report blocks
            tokens = max(each.kv_block_tokens for each in reports)
            config.add_metric((*label, str(tokens), str(blocks)), 1.0)
    yield from (running, waiting, usage, config)
    for name, (kind, text) in COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for model in models:
            counter.add_metric((model, ENGINE), sums.get((kind, (model,)), 0))
        yield counter
    text = "Requests that have finished, by the reason why they ended."
    ended = CounterMetricFamily(
        "vllm:request_success", text, labels=(*LABELS, "finished_reason")
    )
    for (kind, labels), count in sums.items():
        if kind == "finished":
            ended.add_metric((labels[0], ENGINE, labels[1]), count)
    yield ended
    for name, (kind, text) in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for model in models:
            counts = [sums.get((f"{kind}_buckets", (model, e)), 0) for e in ends[kind]]
            buckets = list(zip(ends[kind], itertools.accumulate(counts), strict=True))
            seconds = sums.get((f"{kind}_seconds", (model,)), 0.0)
            histogram.add_metric((model, ENGINE), buckets, seconds)
        yield histogram


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
