"""Metrics by vLLM's names."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from multiworld.serve.gateway.http.metrics import render
from multiworld.serve.gateway.streams.stream_counts import StreamCounts
from multiworld.serve.wire.control_messages import (
    FleetReport,
    GatewayReport,
    WorkerReport,
)
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

TABLE = RoutingTable(
    1,
    ("g",),
    {},
    {
        name: Replica(name, "m", "1", stage, ReplicaState.READY)
        for name, stage in (("m/0/1", 0), ("m/0/2", 0), ("m/1/3", 1))
    },
)


def shown() -> dict[tuple[str, str], float]:
    """Return values by name, and by the label that is not of every metric."""
    counts = StreamCounts()
    for made, reason in ((5, "stop"), (1, "length")):
        counts.first("m", 0.01, 0.02)
        counts.finished("m", reason)
        counts.ended("m", 10, made, 0.4, made)
    sums = {(kind, labels): value for kind, labels, value in counts.counted()}
    replicas = {
        "m/0/1": WorkerReport(
            computing=3, queued=1, kv_usage=0.5, kv_blocks=40, kv_block_tokens=16
        ),
        "m/0/2": WorkerReport(
            computing=1, kv_usage=0.1, kv_blocks=20, kv_block_tokens=16
        ),
        "m/1/3": WorkerReport(computing=9, queued=9, kv_usage=0.9),
    }
    gateways = {"g": GatewayReport(waiting={"m": 4, "other": 7})}
    text = render(sums, gateways, FleetReport(replicas=replicas), TABLE).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "m"
                assert labels.pop("engine") == "0"
                found[sample.name, "".join(labels.values())] = sample.value
    return found


def test_model_has_values_before_its_first_stream_ends() -> None:
    table = RoutingTable(
        1,
        ("g",),
        {
            "m": Route("1", {"1": 1}, generates=True),
            "tensors": Route("1", {"1": 1}),
        },
        TABLE.replicas,
    )
    gateways = {"g": GatewayReport(waiting={"m": 500})}
    text = render({}, gateways, FleetReport(), table).decode()
    of_one = 'engine="0",model_name="m"'
    assert f"vllm:num_requests_waiting{{{of_one}}} 500.0" in text
    assert f"vllm:generation_tokens_total{{{of_one}}} 0.0" in text
    assert "tensors" not in "".join(li for li in text.splitlines() if "vllm:" in li)


def test_values_are_those_of_the_whole_model() -> None:
    found = shown()
    assert found["vllm:num_requests_running", ""] == 4
    assert found["vllm:num_requests_waiting", ""] == 5
    assert found["vllm:kv_cache_usage_perc", ""] == 0.3
    assert found["vllm:prompt_tokens_total", ""] == 20
    assert found["vllm:generation_tokens_total", ""] == 6
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_success_total", "length"] == 1
    assert found["vllm:time_to_first_token_seconds_count", ""] == 2
    assert found["vllm:time_to_first_token_seconds_bucket", "0.05"] == 2
    assert found["vllm:time_to_first_token_seconds_bucket", "0.02"] == 0
    assert found["vllm:request_queue_time_seconds_sum", ""] == 0.02
    assert found["vllm:request_prefill_time_seconds_sum", ""] == 0.04
    assert found["vllm:cache_config_info", "1660"] == 1
    assert found["vllm:request_time_per_output_token_seconds_sum", ""] == 0.1


def test_models_that_generate_nothing_have_none() -> None:
    text = render({}, {}, FleetReport(), TABLE).decode()
    assert "vllm:num_requests_running{" not in text
