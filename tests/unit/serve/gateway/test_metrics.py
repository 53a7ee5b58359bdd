"""Metrics: what is shown, under which labels, and what is forgotten."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from multiworld.serve.gateway.metrics import COUNTERS, GAUGES, Metrics
from multiworld.serve.transport.protocol import (
    ROWS_BOUNDS,
    FleetReport,
    GatewayReport,
    WorkerReport,
)
from multiworld.serve.transport.routing_table import (
    Replica,
    ReplicaState,
    RoutingTable,
)

TABLE = RoutingTable(
    1, ("g",), {}, {"m/0/1": Replica("m/0/1", "m", "1", 0, ReplicaState.READY)}
)
OF_REPLICA = {"model": "m", "version": "1", "stage": "0", "replica": "m/0/1"}


def shown(
    metrics: Metrics,
    report: GatewayReport | None = None,
    fleet: FleetReport | None = None,
    refused: Mapping[tuple[str, str], int] | None = None,
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return all samples, as Prometheus reads them."""
    text = metrics.render(
        report or GatewayReport(), fleet or FleetReport(), TABLE, refused
    )
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def of(**labels: str) -> frozenset[tuple[str, str]]:
    """Return labels as a key."""
    return frozenset(labels.items())


def test_requests_are_counted_by_status_and_only_answers_have_a_latency() -> None:
    """Errors are fast, and would look like a good service."""
    metrics = Metrics("g")
    for status in (200, 200, 429):
        metrics.count("m", "", status, 0.003)
    found = shown(metrics)
    assert found["multiworld_requests_total", of(model="m", status="200")] == 2
    assert found["multiworld_requests_total", of(model="m", status="429")] == 1
    assert found["multiworld_request_seconds_count", of(model="m")] == 2
    name = "multiworld_request_seconds_bucket"
    assert found[name, of(model="m", le="0.002")] == 0
    assert found[name, of(model="m", le="0.005")] == 2
    assert not any(name.startswith("multiworld_tenant") for name, _ in found)


def test_tenants_are_shown_until_they_are_removed() -> None:
    """Else tenants that come and go would fill the memory."""
    metrics = Metrics("g")
    for tenant in ("acme", "beta"):
        metrics.count("m", tenant, 200, 0.5)
        metrics.count("m", tenant, 500, 0.5)
        metrics.count("unknown", tenant, 404, 0.5)
    metrics.keep_tenants({"beta": 1})
    metrics.keep_tenants({"beta": 1})
    found = shown(metrics)
    tenants = {dict(labels).get("tenant") for _, labels in found} - {None}
    assert tenants == {"beta"}
    labels = of(tenant="beta", model="m", status="200")
    assert found["multiworld_tenant_requests_total", labels] == 1
    seconds = of(tenant="beta", model="m")
    assert found["multiworld_tenant_seconds_total", seconds] == 0.5
    metrics.count("m", "acme", 200, 1.0)  # the same name again, from nothing
    seconds = of(tenant="acme", model="m")
    assert shown(metrics)["multiworld_tenant_seconds_total", seconds] == 1.0


def test_report_of_the_router_is_shown() -> None:
    """Replicas that it is connected to with their load, at 0 as well."""
    report = GatewayReport(
        in_flight=3,
        load={"m/0/1": 2, "gone": 9},
        waiting={"m": 4},
        silent=("m/0/1",),
        connected=("m/0/1",),
        counts={"replayed": 5},
        attained={"m": 6},
        missed={"m": 7},
    )
    found = shown(Metrics("g"), report, refused={("acme", "rpm_limit"): 8})
    g = {"gateway": "g"}
    assert found["multiworld_in_flight", of(**g)] == 3
    assert found["multiworld_waiting", of(**g, model="m")] == 4
    assert found["multiworld_attained_total", of(**g, model="m")] == 6
    assert found["multiworld_missed_total", of(**g, model="m")] == 7
    assert found["multiworld_router_events_total", of(**g, kind="replayed")] == 5
    assert found["multiworld_replica_in_flight", of(**g, **OF_REPLICA)] == 2
    assert found["multiworld_replica_silent", of(**g, **OF_REPLICA)] == 1
    labels = of(**g, tenant="acme", why="rpm_limit")
    assert found["multiworld_refused_total", labels] == 8
    assert not any("gone" in dict(labels).values() for _, labels in found)


def test_reports_of_replicas_are_shown() -> None:
    """Every count and gauge; one that is in no table by its name alone."""
    counts = {name: number for number, name in enumerate(COUNTERS, start=1)}
    worker = WorkerReport(
        queued=3,
        computing=4,
        waiting_for_next=5,
        computed_s=1.5,
        counts={**counts, "batches": 10, "rows": 30},
        batch_rows=(4, 6, *[0] * (len(ROWS_BOUNDS) - 1)),
    )
    fleet = FleetReport({"lost": 2}, {"m/0/1": worker, "new": WorkerReport()})
    found = shown(Metrics("g"), fleet=fleet)
    for name, number in counts.items():
        assert found[f"multiworld_replica_{name}_total", of(**OF_REPLICA)] == number
    for name in GAUGES:
        assert found[f"multiworld_replica_{name}", of(**OF_REPLICA)] == getattr(
            worker, name
        )
    assert found["multiworld_batch_rows_sum", of(**OF_REPLICA)] == 30
    assert found["multiworld_batch_rows_count", of(**OF_REPLICA)] == 10
    assert found["multiworld_batch_seconds_sum", of(**OF_REPLICA)] == 1.5
    assert found["multiworld_fleet_events_total", of(kind="lost")] == 2
    unknown = of(model="", version="", stage="", replica="new")
    assert found["multiworld_replica_queued", unknown] == 0


@given(st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_names_of_any_letters_can_be_read_again(model: str, tenant: str) -> None:
    """Quotes, line ends and backslashes are escaped."""
    model, tenant = (
        text.encode("utf-8", "ignore").decode() for text in (model, tenant + "x")
    )
    metrics = Metrics("g")
    metrics.count(model, tenant, 200, 0.1)
    labels = of(model=model, tenant=tenant, status="200")
    assert shown(metrics)["multiworld_tenant_requests_total", labels] == 1
