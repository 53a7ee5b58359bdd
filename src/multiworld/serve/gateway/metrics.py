"""Prometheus metrics of one gateway. Shell.

Metrics of requests and latencies cover this gateway only: sum them over gateways. The
controller reports metrics of replicas and of the fleet every few seconds, and every
gateway shows the same ones: read them from any one gateway.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from multiworld.serve.transport.protocol import (
    ROWS_BOUNDS,
    SECONDS_BOUNDS,
    FleetReport,
    GatewayReport,
    WorkerReport,
)
from multiworld.serve.transport.routing_table import RoutingTable

Refused = Mapping[tuple[str, str], int]
"""Refused requests, by tenant and reason."""

LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
"""Upper bounds of the latency histogram's buckets, in seconds."""

OF_REPLICA = ("model", "version", "stage", "replica")
"""Labels of a replica."""

COUNTERS = {
    "requests": "Requests computed.",
    "failed": "Requests for which the model raised an error.",
    "cancelled": "Requests cancelled before they were computed.",
    "dropped": "Requests sent to the next stage that may be lost.",
    "stuck": "Requests sent to a replica of the next stage that fell silent.",
    "returned": "Requests that the next stage did not take; the gateway replays them.",
}
GAUGES = {
    "queued": "Requests waiting to be computed.",
    "computing": "Requests in the batch being computed.",
    "waiting_for_next": "Outputs waiting for room at the next stage.",
}


class Metrics:
    """Metrics of one gateway, in their own registry."""

    def __init__(self, gateway: str) -> None:
        self._registry = CollectorRegistry()
        self._snapshot = _Snapshot(gateway)
        self._registry.register(self._snapshot)
        self.requests = Counter(
            "multiworld_requests",
            "Requests answered, by HTTP status.",
            ["model", "status"],
            registry=self._registry,
        )
        self.latency = Histogram(
            "multiworld_request_seconds",
            "Seconds from the whole request to its answer.",
            ["model"],
            buckets=LATENCY_S,
            registry=self._registry,
        )
        self.tenant_requests = Counter(
            "multiworld_tenant_requests",
            "Requests of a tenant answered, by HTTP status.",
            ["tenant", "model", "status"],
            registry=self._registry,
        )
        self.tenant_seconds = Counter(
            "multiworld_tenant_seconds",
            "Total seconds of the answered requests of a tenant.",
            ["tenant", "model"],
            registry=self._registry,
        )
        self._seen: dict[str, set[tuple[str, int]]] = {}
        self._counters: dict[tuple[str, str, int], list[Counter]] = {}
        self._latencies: dict[str, Histogram] = {}

    def keep_tenants(self, names: Container[str]) -> None:
        """Remove the metrics of tenants that no longer exist."""
        for tenant in [name for name in self._seen if name not in names]:
            for model, status in self._seen.pop(tenant):
                self.tenant_requests.remove(tenant, model, str(status))
                self._counters.pop((model, tenant, status), None)
                if status == 200:
                    self.tenant_seconds.remove(tenant, model)

    def count(self, model: str, tenant: str, status: int, took_s: float) -> None:
        """Count a finished request.

        Args:
            model: Name of the model.
            tenant: Name of the tenant; empty for clients without a key.
            status: HTTP status of the answer.
            took_s: Seconds from its admission to its end.
        """
        counters = self._counters.get((model, tenant, status))
        if counters is None:
            counters = self._made(model, tenant, status)
        for counter in counters:
            counter.inc()
        if status == 200:
            self._latencies[model].observe(took_s)
            if tenant:
                self.tenant_seconds.labels(tenant, model).inc(took_s)

    def _made(self, model: str, tenant: str, status: int) -> list[Counter]:
        """Return new counters of these labels; ``labels`` takes longer than a dict."""
        found = [self.requests.labels(model, status)]
        if tenant:
            found.append(self.tenant_requests.labels(tenant, model, status))
            self._seen.setdefault(tenant, set()).add((model, status))
        if status == 200:
            self._latencies[model] = self.latency.labels(model)
        self._counters[model, tenant, status] = found
        return found

    def render(
        self,
        report: GatewayReport,
        fleet: FleetReport,
        table: RoutingTable,
        refused: Refused | None = None,
    ) -> bytes:
        """Return the metrics in Prometheus's text format.

        Args:
            report: Report of the dispatcher.
            fleet: Latest report of the controller: ``replicas``, their reports by
                name, and ``events``, counts by kind.
            table: The routing table.
            refused: Refused requests, by tenant and reason.
        """
        self._snapshot.show(report, fleet, table, refused or {})
        return generate_latest(self._registry)


class _Snapshot(Collector):
    """Collector of numbers that other objects keep."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._report: GatewayReport | None = None
        self._fleet = FleetReport()
        self._table = RoutingTable()
        self._refusals: Refused = {}

    def show(
        self,
        report: GatewayReport,
        fleet: FleetReport,
        table: RoutingTable,
        refused: Refused,
    ) -> None:
        """Set the numbers that ``collect`` yields."""
        self._report, self._fleet, self._table = report, fleet, table
        self._refusals = refused

    def collect(self) -> Iterator[Metric]:
        """Yield all of them."""
        if self._report is not None:
            yield from self._router(self._report)
            yield from self._replicas(self._fleet.replicas)
            yield self._events(self._fleet.events)
            yield self._refused()

    def _refused(self) -> Metric:
        refused = CounterMetricFamily(
            "multiworld_refused",
            "Requests refused, by reason and by tenant (empty: no valid key).",
            labels=["gateway", "tenant", "why"],
        )
        for (tenant, why), count in self._refusals.items():
            refused.add_metric([self._gateway, tenant, why], count)
        return refused

    def _router(self, report: GatewayReport) -> Iterator[Metric]:
        own = [self._gateway]
        in_flight = GaugeMetricFamily(
            "multiworld_in_flight",
            "Requests accepted and not answered.",
            labels=["gateway"],
        )
        in_flight.add_metric(own, report.in_flight)
        yield in_flight
        waiting = GaugeMetricFamily(
            "multiworld_waiting",
            "Requests waiting at the gateway.",
            labels=["gateway", "model"],
        )
        for model, count in report.waiting.items():
            waiting.add_metric([*own, model], count)
        yield waiting
        attained = CounterMetricFamily(
            "multiworld_attained",
            "Requests answered within objective_ms of their model.",
            labels=["gateway", "model"],
        )
        for model, count in report.attained.items():
            attained.add_metric([*own, model], count)
        yield attained
        missed = CounterMetricFamily(
            "multiworld_missed",
            "Requests answered later, given up or refused by a full queue.",
            labels=["gateway", "model"],
        )
        for model, count in report.missed.items():
            missed.add_metric([*own, model], count)
        yield missed
        events = CounterMetricFamily(
            "multiworld_router_events",
            "Answers, replays and refusals, by kind.",
            labels=["gateway", "kind"],
        )
        for kind, count in report.counts.items():
            events.add_metric([*own, kind], count)
        yield events
        held = GaugeMetricFamily(
            "multiworld_replica_in_flight",
            "Attempts of this gateway at a replica.",
            labels=["gateway", *OF_REPLICA],
        )
        silent = GaugeMetricFamily(
            "multiworld_replica_silent",
            "1 while a replica is silent.",
            labels=["gateway", *OF_REPLICA],
        )
        for name in report.connected:
            labels = [*own, *self._labels(name)]
            held.add_metric(labels, report.load.get(name, 0))
            silent.add_metric(labels, float(name in report.silent))
        yield held
        yield silent

    def _replicas(self, reports: Mapping[str, WorkerReport]) -> Iterator[Metric]:
        for what, text in COUNTERS.items():
            counter = CounterMetricFamily(
                f"multiworld_replica_{what}", text, labels=OF_REPLICA
            )
            for name, report in reports.items():
                counter.add_metric(self._labels(name), report.counts.get(what, 0))
            yield counter
        for what, text in GAUGES.items():
            gauge = GaugeMetricFamily(
                f"multiworld_replica_{what}", text, labels=OF_REPLICA
            )
            for name, report in reports.items():
                gauge.add_metric(self._labels(name), float(getattr(report, what)))
            yield gauge
        sizes = HistogramMetricFamily(
            "multiworld_batch_rows", "Rows of a batch.", labels=OF_REPLICA
        )
        times = HistogramMetricFamily(
            "multiworld_batch_seconds", "Seconds of a batch.", labels=OF_REPLICA
        )
        for name, report in reports.items():
            labels, rows = self._labels(name), report.counts.get("rows", 0)
            sizes.add_metric(labels, _buckets(ROWS_BOUNDS, report.batch_rows), rows)
            seconds = _buckets(SECONDS_BOUNDS, report.batch_seconds)
            times.add_metric(labels, seconds, report.computed_s)
        yield sizes
        yield times

    def _events(self, counts: Mapping[str, int]) -> Metric:
        events = CounterMetricFamily(
            "multiworld_fleet_events",
            "Events of the fleet, by kind (lost, ready, scale, updated, …).",
            labels=["kind"],
        )
        for kind, count in counts.items():
            events.add_metric([kind], count)
        return events

    def _labels(self, name: str) -> list[str]:
        replica = self._table.replicas.get(name)
        if replica is None:
            return ["", "", "", name]
        return [replica.model, replica.version, str(replica.stage), name]


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return the cumulative buckets of a histogram, as Prometheus wants them."""
    ends = [f"{bound:g}" for bound in bounds] + ["+Inf"]
    sums = itertools.accumulate(counts or [0] * len(ends))
    return list(zip(ends, map(float, sums), strict=True))
