"""What a load run found, in numbers. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        due_s: When it was to be sent, in seconds since the run began.
        latency_s: From when it was *due* to its whole answer: a generator that is late
            does not hide what clients would have waited.
        status: HTTP status; 0: no answer (``error`` says why).
        is_right: What the check said; None if it was not checked.
    """

    due_s: float
    latency_s: float
    status: int
    is_right: bool | None = None
    error: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether it got what it asked for."""
        return self.status == 200


@dataclass(frozen=True, slots=True)
class Summary:
    """Of many requests; latencies in seconds, of those that were answered."""

    sent: int
    answered: int
    failed: int
    wrong: int
    p50_s: float
    p99_s: float
    max_s: float
    statuses: dict[int, int]
    errors: dict[str, int]


def quantile(values: Sequence[float], q: float) -> float:
    """Return the nearest-rank quantile; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def summarise(samples: Iterable[Sample]) -> Summary:
    """Return the numbers of a run, or of a part of one."""
    everything = list(samples)
    latencies = [s.latency_s for s in everything if s.is_answered]
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
    )
