"""Measured numbers, and what they say. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Series:
    """One thing measured again and again.

    Attributes:
        kind: What was measured: "stream", "round trip" …
        size: Bytes of a message, or how many of something; see ``kind``.
        contender: Who did it.
        unit: Of the samples: "messages/s", "us" …; a rate is better if it is higher.
        samples: One for each round.
    """

    kind: str
    size: int
    contender: str
    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit.endswith("/s")

    @property
    def median(self) -> float:
        """The median round."""
        return statistics.median(self.samples)

    @property
    def worst(self) -> float:
        """The round that was worst in a hundred; of fewer than that, the worst."""
        ordered = sorted(self.samples, reverse=self.is_rate)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


@dataclass(slots=True)
class BenchReport:
    """What a suite found.

    Attributes:
        baseline: The contender that ratios are to; none if empty.
        notes: What a reader has to know to trust it.
    """

    suite: str
    baseline: str
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, kind: str, size: int, contender: str, unit: str, sample: float
    ) -> None:
        """Add one sample."""
        found = self.find(kind, size, contender)
        if found is None:
            found = Series(kind, size, contender, unit)
            self.series.append(found)
        found.samples.append(sample)

    def find(self, kind: str, size: int, contender: str) -> Series | None:
        """Return a series."""
        wanted = kind, size, contender
        return next(
            (s for s in self.series if (s.kind, s.size, s.contender) == wanted), None
        )

    def ratio(self, series: Series) -> float | None:
        """Return the median of the rounds' ratios to the baseline, as measured.

        Of rates, more than 1 is faster; of times, less than 1 is.
        """
        ratios = self.ratios(series)
        return statistics.median(ratios) if ratios else None

    def ratios(self, series: Series) -> list[float]:
        """Return the ratio to the baseline of each round; empty without one."""
        base = self.find(series.kind, series.size, self.baseline)
        if base is None or len(base.samples) != len(series.samples):
            return []
        pairs = zip(series.samples, base.samples, strict=True)
        return [a / b for a, b in pairs if b]


def interval(
    samples: Sequence[float], *, level: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """Return a bootstrap confidence interval of the median.

    Percentile bootstrap (Efron 1979), seeded: the same samples give the same interval.
    """
    source = random.Random(0)
    medians = sorted(
        statistics.median(source.choices(samples, k=len(samples))) for _ in range(draws)
    )
    edge = int(draws * (1 - level) / 2)
    return medians[edge], medians[draws - 1 - edge]
