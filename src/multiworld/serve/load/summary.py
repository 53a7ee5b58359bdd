"""Summary of a load run: counts, quantiles of latency, errors. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    due_s: float  # since the run started
    latency_s: float  # since it was *due*, to include delays of the generator
    status: int  # HTTP status; 0 if there was no answer (see ``error``)
    is_right: bool | None = None  # result of the check; None if not checked
    error: str = ""
    # Seconds by phase, if the service reported them.
    phases: Mapping[str, float] | None = None
    times: tuple[float, ...] = ()  # seconds from its due time to each part of a stream
    is_cut: bool = False  # the answer ended prematurely

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and not self.is_cut


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of many requests; latencies are those of answered requests."""

    sent: int
    answered: int  # answered completely, with status 200
    failed: int
    wrong: int
    p50_s: float
    p99_s: float
    max_s: float
    statuses: dict[int, int]
    errors: dict[str, int]  # by text, the ten most frequent
    cut: int = 0  # answers that ended prematurely
    first_p50_s: float | None = None  # time to the first part of a stream
    first_p99_s: float | None = None
    gap_p50_s: float | None = None  # time between two parts of a stream
    gap_p99_s: float | None = None
    gap_max_s: float | None = None


def quantile(values: Sequence[float], q: float) -> float:
    """Return the nearest-rank quantile; NaN if there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def summarise(samples: Iterable[Sample]) -> Summary:
    everything = list(samples)
    latencies = [s.latency_s for s in everything if s.is_answered]
    first = [s.times[0] for s in everything if s.times]
    gaps = [b - a for s in everything for a, b in itertools.pairwise(s.times)]
    return Summary(
        sent=len(everything),
        answered=len(latencies),
        failed=len(everything) - len(latencies),
        wrong=sum(s.is_right is False for s in everything),
        p50_s=quantile(latencies, 0.5),
        p99_s=quantile(latencies, 0.99),
        max_s=max(latencies, default=math.nan),
        statuses=dict(sorted(Counter(s.status for s in everything).items())),
        errors=dict(Counter(s.error for s in everything if s.error).most_common(10)),
        cut=sum(s.is_cut for s in everything),
        first_p50_s=quantile(first, 0.5) if first else None,
        first_p99_s=quantile(first, 0.99) if first else None,
        gap_p50_s=quantile(gaps, 0.5) if gaps else None,
        gap_p99_s=quantile(gaps, 0.99) if gaps else None,
        gap_max_s=max(gaps, default=None),
    )
