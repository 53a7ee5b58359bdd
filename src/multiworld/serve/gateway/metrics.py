"""What Prometheus reads of one gateway."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
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
        self._in_flight = self._gauge("in_flight", "Requests accepted, not answered.")
        self._waiting = self._gauge(
            "waiting", "Requests that wait at the gateway.", ["model"]
        )
        self._held = self._gauge(
            "replica_in_flight", "Attempts at a replica.", ["replica"]
        )
        self._is_silent = self._gauge(
            "replica_silent", "1 while a replica gives no sign.", ["replica"]
        )
        self._events = self._gauge(
            "router_events", "Replays and refusals so far, by kind.", ["kind"]
        )
        self._replica = self._gauge(
            "replica", "What a replica says of itself.", ["replica", "what"]
        )

    def _gauge(self, name: str, text: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(f"multiworld_{name}", text, labels or [], registry=self._registry)

    def render(self, report: dict[str, Any], replicas: dict[str, Any]) -> bytes:
        """Return the text that Prometheus reads.

        Args:
            report: Of the dispatcher.
            replicas: The latest report of each replica, by name.
        """
        self._in_flight.set(report["in_flight"])
        for gauge in (self._held, self._is_silent, self._replica, self._waiting):
            gauge.clear()
        for model, count in report["waiting"].items():
            self._waiting.labels(model).set(count)
        for replica, count in report["load"].items():
            self._held.labels(replica).set(count)
        for replica in report["connected"]:
            is_silent = replica in report["silent"]
            self._is_silent.labels(replica).set(is_silent)
        for kind, count in report["counts"].items():
            self._events.labels(kind).set(count)
        for replica, said in replicas.items():
            numbers = {**said, **said.get("counts", {})}
            for what, value in numbers.items():
                if isinstance(value, int | float):
                    self._replica.labels(replica, what).set(value)
        return generate_latest(self._registry)
