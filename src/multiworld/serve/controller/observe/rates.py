"""Rates and quantiles over the last seconds, computed from counters. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

Label = tuple[str, tuple[str, ...]]  # kind of count, and its labels

RATE_S = 10.0  # seconds over which rates are measured
QUANTILE_S = 60.0  # seconds over which quantiles are measured


class Window:
    """The counts of the last ``QUANTILE_S`` seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[Label, float]]] = deque()

    def seen(self, counts: Mapping[Label, float], now: float) -> None:
        self._samples.append((now, counts))
        while len(self._samples) > 2 and self._samples[1][0] <= now - QUANTILE_S:
            self._samples.popleft()

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()

    def _before(self, seconds: float) -> tuple[float, Mapping[Label, float]] | None:
        """Return the latest sample at least ``seconds`` old, otherwise the oldest."""
        if len(self._samples) < 2:
            return None
        now = self._samples[-1][0]
        found = self._samples[0]
        for sample in self._samples:
            if sample[0] > now - seconds:
                break
            found = sample
        return found

    def rates(self, kind: str) -> dict[tuple[str, ...], float]:
        """Return the growth of counts per second, by their labels."""
        before = self._before(RATE_S)
        if before is None:
            return {}
        now, counts = self._samples[-1]
        took_s = max(now - before[0], 1e-9)
        return {
            labels: grown / took_s
            for (name, labels), value in counts.items()
            if name == kind
            and (grown := value - before[1].get((name, labels), 0.0)) > 0
        }

    def quantiles(self, kind: str, model: str, at: tuple[float, ...]) -> list[float]:
        """Return quantiles of a model's histogram; empty if it counted nothing.

        ``kind`` names its buckets, whose labels are the model and the upper bound.
        """
        before = self._before(QUANTILE_S)
        if before is None:
            return []
        counts = self._samples[-1][1]
        buckets = sorted(
            (float(labels[1]), value - before[1].get((name, labels), 0.0))
            for (name, labels), value in counts.items()
            if name == kind and labels[0] == model
        )
        return [quantile(buckets, share) for share in at] if _total(buckets) else []


def _total(buckets: list[tuple[float, float]]) -> float:
    return sum(count for _, count in buckets)


def quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Return a quantile of a histogram, interpolated as in Prometheus.

    A quantile in the last, unbounded bucket is the upper bound of the bucket before it.
    """
    wanted, sum_before, low = share * _total(buckets), 0.0, 0.0
    for bound, count in buckets:
        if count and sum_before + count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - sum_before) / count
        sum_before += count
        low = bound if bound != float("inf") else low
    return low
