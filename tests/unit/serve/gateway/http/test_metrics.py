"""Metrics: values, labels, and when they are dropped."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import multiworld
from multiworld.serve.gateway.admission.timing import Phases
from multiworld.serve.gateway.http.metrics import GAUGES, OF_WORK, render
from multiworld.serve.gateway.http.request_counts import RequestCounts
from multiworld.serve.wire.control_messages import (
    ROWS_BOUNDS,
    Counted,
    FleetReport,
    GatewayReport,
    TenantLoad,
    WorkerReport,
)
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

TABLE = RoutingTable(
    1, ("g",), {}, {"m/0/1": Replica("m/0/1", "m", "1", 0, ReplicaState.READY)}
)
OF_STAGE = {"model": "m", "version": "1", "stage": "0"}
OF_REPLICA = {**OF_STAGE, "replica": "m/0/1"}


def shown(
    *counted: Counted,
    gateways: dict[str, GatewayReport] | None = None,
    fleet: FleetReport | None = None,
    table: RoutingTable = TABLE,
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for kind, labels, value in counted:
        sums[kind, labels] += value  # type: ignore[assignment]
    text = render(sums, gateways or {}, fleet or FleetReport(), table)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def of(**labels: str) -> frozenset[tuple[str, str]]:
    """Return labels as a key."""
    return frozenset(labels.items())


def test_requests_are_counted_by_status_and_only_answers_have_a_latency() -> None:
    """Errors are fast and would make the latency look good."""
    counts = RequestCounts()
    for status in (200, 200, 429):
        counts.add("m", "", status, 0.003)
    counts.add("m", "", 200, 99.0)
    found = shown(*counts.counted())
    assert found["multiworld_requests_total", of(model="m", status="200")] == 3
    assert found["multiworld_requests_total", of(model="m", status="429")] == 1
    assert found["multiworld_request_seconds_count", of(model="m")] == 3
    assert found["multiworld_request_seconds_sum", of(model="m")] == 99.006
    name = "multiworld_request_seconds_bucket"
    assert found[name, of(model="m", le="0.002")] == 0
    assert found[name, of(model="m", le="0.005")] == 2
    assert found[name, of(model="m", le="30")] == 2
    assert found[name, of(model="m", le="+Inf")] == 3
    assert not any(name.startswith("multiworld_tenant") for name, _ in found)


@pytest.mark.parametrize(
    ("state", "is_missing"),
    [(ReplicaState.READY, 0), (ReplicaState.STARTING, 1), (None, 1)],
)
def test_stage_without_a_ready_replica_of_the_active_version_is_missing(
    state: ReplicaState | None, is_missing: int
) -> None:
    """Neither a version that loads, nor one that drains, counts."""
    replicas = {
        "m/0/1": Replica("m/0/1", "m", "1", 0, state or ReplicaState.READY),
        "m/0/2": Replica("m/0/2", "m", "2", 0, ReplicaState.STARTING),
        "m/0/3": Replica("m/0/3", "m", "0", 0, ReplicaState.DRAINING),
    }
    if state is None:
        del replicas["m/0/1"]
    stages = {"0": 1, "1": 2, "2": 1}
    route = Route("1", stages, on_demand=(1,))
    table = RoutingTable(1, ("g",), {"m": route, "m@t": route}, replicas)
    found = shown(table=table, fleet=FleetReport(unplaced=(("m", "0"),)))
    name = "multiworld_stage_missing"
    assert found[name, of(model="m", stage="0")] == is_missing
    assert found[name, of(model="m", stage="1")] == 0
    assert (name, of(model="m@t", stage="0")) not in found
    assert found["multiworld_stage_unplaced", of(model="m", stage="0")] == 1


def test_phases_of_answers_are_added_up() -> None:
    counts = RequestCounts()
    for _ in range(2):
        counts.add("m", "", 200, 1.5, Phases(0.1, 0.2, 0.3, 0.4, 0.5))
    counts.add("m", "", 200, 1.0)
    counts.add("m", "", 500, 1.0, Phases(9.0, 9.0, 9.0, 9.0, 9.0))
    found = shown(*counts.counted())
    name = "multiworld_phase_seconds_total"
    assert [found[name, of(model="m", phase=phase)] for phase in Phases._fields] == [
        0.2,
        0.4,
        0.6,
        0.8,
        1.0,
    ]


def test_counts_of_several_gateways_are_added_up() -> None:
    one, other = RequestCounts(), RequestCounts()
    one.add("m", "acme", 200, 0.003)
    other.add("m", "acme", 200, 0.5)
    other.add("m", "", 503, 0.5)
    found = shown(*one.counted(), *other.counted())
    assert found["multiworld_requests_total", of(model="m", status="200")] == 2
    assert found["multiworld_requests_total", of(model="m", status="503")] == 1
    name = "multiworld_request_seconds_bucket"
    assert found[name, of(model="m", le="0.005")] == 1
    assert found[name, of(model="m", le="+Inf")] == 2
    labels = of(tenant="acme", model="m", status="200")
    assert found["multiworld_tenant_requests_total", labels] == 2


def test_tenants_are_counted_until_they_are_removed() -> None:
    """Otherwise tenants that come and go would fill the memory."""
    counts = RequestCounts()
    for tenant in ("acme", "beta"):
        counts.add("m", tenant, 200, 0.5)
        counts.add("m", tenant, 500, 0.5)
        counts.add("unknown", tenant, 404, 0.5)
    counts.keep_tenants({"beta": 1})
    counts.keep_tenants({"beta": 1})
    found = shown(*counts.counted())
    tenants = {dict(labels).get("tenant") for _, labels in found} - {None}
    assert tenants == {"beta"}
    labels = of(tenant="beta", model="m", status="200")
    assert found["multiworld_tenant_requests_total", labels] == 1
    seconds = of(tenant="beta", model="m")
    assert found["multiworld_tenant_seconds_total", seconds] == 0.5
    assert found["multiworld_requests_total", of(model="m", status="200")] == 2
    counts.add("m", "acme", 200, 1.0)  # the same name again starts at zero
    seconds = of(tenant="acme", model="m")
    found = shown(*counts.counted())
    assert found["multiworld_tenant_seconds_total", seconds] == 1.0


def test_reports_of_gateways_are_shown_each() -> None:
    report = GatewayReport(
        in_flight=3,
        load={"m/0/1": 2, "gone": 9},
        waiting={"m": 4},
        silent=("m/0/1",),
        connected=("m/0/1",),
        cpu_s=1.5,
        tenants={"acme": TenantLoad(3, 2, 1, 40)},
        oldest_s={"m": 7.5},
    )
    found = shown(gateways={"g": report, "h": GatewayReport(in_flight=1)})
    g = {"gateway": "g"}
    assert found["multiworld_in_flight", of(**g)] == 3
    assert found["multiworld_in_flight", of(gateway="h")] == 1
    assert found["multiworld_waiting", of(**g, model="m")] == 4
    assert found["multiworld_oldest_request_seconds", of(**g, model="m")] == 7.5
    assert found["multiworld_tenant_in_flight", of(**g, tenant="acme")] == 3
    of_acme = of(**g, tenant="acme")
    assert found["multiworld_tenant_waiting_prompt_tokens", of_acme] == 40
    assert found["multiworld_replica_in_flight", of(**g, **OF_REPLICA)] == 2
    assert found["multiworld_replica_silent", of(**g, **OF_REPLICA)] == 1
    assert found["multiworld_process_cpu_seconds_total", of(process="g")] == 1.5
    assert not any("gone" in dict(labels).values() for _, labels in found)


def test_counts_of_events_and_refusals_are_shown_without_their_gateway() -> None:
    """They are sums over all gateways."""
    found = shown(
        ("router_events", ("replayed",), 5),
        ("fleet_events", ("lost", "m", "0"), 2),
        ("attained", ("m",), 6),
        ("missed", ("m",), 7),
        ("refused", ("acme", "rpm_limit"), 8),
        ("stage_requests", ("m", "1", "0"), 9),
        ("of a later release", ("x",), 1),
    )
    assert found["multiworld_router_events_total", of(kind="replayed")] == 5
    lost = of(kind="lost", model="m", stage="0")
    assert found["multiworld_fleet_events_total", lost] == 2
    assert found["multiworld_attained_total", of(model="m")] == 6
    assert found["multiworld_missed_total", of(model="m")] == 7
    labels = of(tenant="acme", why="rpm_limit")
    assert found["multiworld_refused_total", labels] == 8
    assert found["multiworld_stage_requests_total", of(**OF_STAGE)] == 9


def test_reports_of_replicas_are_shown() -> None:
    """A replica that is in no table has only its name as a label."""
    counts = {name: number for number, name in enumerate(OF_WORK, start=1)}
    worker = WorkerReport(
        queued=3,
        computing=4,
        waiting_for_next=5,
        computed_s=1.5,
        counts={**counts, "batches": 10, "rows": 30},
        batch_rows=(4, 6, *[0] * (len(ROWS_BOUNDS) - 1)),
        cpu_s=2.5,
    )
    replicas = {"m/0/1": worker, "new": WorkerReport(computed_s=1.0)}
    found = shown(fleet=FleetReport(1, replicas))
    for name, number in counts.items():
        assert found[f"multiworld_replica_{name}_total", of(**OF_REPLICA)] == number
    for name in GAUGES:
        assert found[f"multiworld_replica_{name}", of(**OF_REPLICA)] == getattr(
            worker, name
        )
    assert found["multiworld_batch_rows_sum", of(**OF_REPLICA)] == 30
    assert found["multiworld_batch_rows_count", of(**OF_REPLICA)] == 10
    assert found["multiworld_batch_seconds_sum", of(**OF_REPLICA)] == 1.5
    assert found["multiworld_process_cpu_seconds_total", of(process="m/0/1")] == 2.5
    unknown = of(model="", version="", stage="", replica="new")
    # Without batches, a histogram of steps would have a sum and no count.
    assert ("multiworld_batch_seconds_sum", unknown) not in found
    assert found["multiworld_replica_queued", unknown] == 0


def test_build_is_shown() -> None:
    """It shows the progress of a rolling update."""
    (labels,) = [
        dict(labels) for name, labels in shown() if name == "multiworld_build_info"
    ]
    assert labels.keys() == {"version", "python", "torch"}
    assert labels["version"] == multiworld.__version__


@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_names_of_any_letters_can_be_read_again(model: str, tenant: str) -> None:
    model, tenant = (
        text.encode("utf-8", "ignore").decode() for text in (model, tenant + "x")
    )
    counts = RequestCounts()
    counts.add(model, tenant, 200, 0.1)
    labels = of(model=model, tenant=tenant, status="200")
    found = shown(*counts.counted())
    assert found["multiworld_tenant_requests_total", labels] == 1
