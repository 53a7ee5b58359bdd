"""Counts of the requests of one gateway. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Container, Iterator

from multiworld.serve.gateway.admission.timing import Phases
from multiworld.serve.wire.control_messages import Counted

# Upper bounds of the latency buckets, in seconds; the last bucket has no bound.
SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
LATENCY_S = (*SHORT_S, 60, 120, 300, 600)  # streams may take minutes

ENDS = (*(f"{bound:g}" for bound in LATENCY_S), "+Inf")  # bounds, as in Prometheus


class RequestCounts:
    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: Counter[str] = Counter()
        self._phases: dict[str, list[float]] = {}
        self._of_tenants: Counter[tuple[str, str, int]] = Counter()
        self._seconds_of_tenants: Counter[tuple[str, str]] = Counter()

    def add(
        self,
        model: str,
        tenant: str,
        status: int,
        took_s: float,
        phases: Phases | None = None,
    ) -> None:
        """Count a request; ``phases`` is None if it did not reach the replicas."""
        self._requests[model, status] += 1
        if tenant:
            self._of_tenants[tenant, model, status] += 1
        if status != 200:
            return
        if tenant:
            self._seconds_of_tenants[tenant, model] += took_s  # type: ignore[assignment]
        buckets = self._buckets.get(model)
        if buckets is None:
            buckets = self._buckets[model] = [0] * len(ENDS)
        buckets[bisect_left(LATENCY_S, took_s)] += 1
        self._seconds[model] += took_s  # type: ignore[assignment]
        if phases is not None:
            sums = self._phases.setdefault(model, [0.0] * len(phases))
            for number, seconds in enumerate(phases):
                sums[number] += seconds

    def keep_tenants(self, names: Container[str]) -> None:
        for key in [key for key in self._of_tenants if key[0] not in names]:
            del self._of_tenants[key]
        for pair in [pair for pair in self._seconds_of_tenants if pair[0] not in names]:
            del self._seconds_of_tenants[pair]

    def counted(self) -> Iterator[Counted]:
        for (model, status), count in self._requests.items():
            yield "requests", (model, str(status)), count
        for model, buckets in self._buckets.items():
            for end, count in zip(ENDS, buckets, strict=True):
                yield "request_buckets", (model, end), count
            yield "request_seconds", (model,), self._seconds[model]
        for model, sums in self._phases.items():
            for phase, seconds in zip(Phases._fields, sums, strict=True):
                yield "phase_seconds", (model, phase), seconds
        for (tenant, model, status), count in self._of_tenants.items():
            yield "tenant_requests", (tenant, model, str(status)), count
        for (tenant, model), seconds in self._seconds_of_tenants.items():
            yield "tenant_seconds", (tenant, model), seconds
