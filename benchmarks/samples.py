"""Samples of a benchmark and their statistics."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Series:
    """Samples of one measurement, one for each round.

    Attributes:
        kind: Measurement: "stream", "round trip" …
        size: Bytes of a message, or another size that ``kind`` names.
        contender: Name of the contender.
        unit: Unit of the samples; a unit that ends in "/s" means rates.
        samples: Measured numbers, in the order of the rounds.
    """

    kind: str
    size: int
    contender: str
    unit: str
    samples: list[float] = field(default_factory=list)

    @property
    def is_rate(self) -> bool:
        """Whether the samples are rates, so that higher is better."""
        return self.unit.endswith("/s")

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def worst(self) -> float:
        """Worst sample; of more than 100 samples, their 99th percentile."""
        ordered = sorted(self.samples, reverse=self.is_rate)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


@dataclass(slots=True)
class BenchReport:
    """Results of a suite.

    Attributes:
        suite: Name of the suite.
        baseline: Contender that ratios refer to; empty for none.
        series: Samples of every measurement.
        notes: Remarks that a reader of the results must know.
    """

    suite: str
    baseline: str
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self, kind: str, size: int, contender: str, unit: str, sample: float
    ) -> None:
        """Add one sample; ``unit`` is ignored if the series exists."""
        found = self.find(kind, size, contender)
        if found is None:
            found = Series(kind, size, contender, unit)
            self.series.append(found)
        found.samples.append(sample)

    def find(self, kind: str, size: int, contender: str) -> Series | None:
        wanted = kind, size, contender
        return next(
            (s for s in self.series if (s.kind, s.size, s.contender) == wanted), None
        )

    def ratio(self, series: Series) -> float | None:
        """Return the median of the rounds' ratios to the baseline; None without one."""
        # For rates, a ratio above 1 is faster; for times, a ratio below 1 is.
        ratios = self.ratios(series)
        return statistics.median(ratios) if ratios else None

    def ratios(self, series: Series) -> list[float]:
        """Return each round's ratio to the baseline; empty without a baseline."""
        base = self.find(series.kind, series.size, self.baseline)
        if base is None or len(base.samples) != len(series.samples):
            return []
        pairs = zip(series.samples, base.samples, strict=True)
        return [a / b for a, b in pairs if b]


def interval(
    samples: Sequence[float], *, level: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """Return a bootstrap confidence interval of the median (``draws`` resamples)."""
    # Percentile bootstrap (Efron 1979). The draws are seeded, so that the same samples
    # give the same interval.
    source = random.Random(0)
    medians = sorted(
        statistics.median(source.choices(samples, k=len(samples))) for _ in range(draws)
    )
    edge = int(draws * (1 - level) / 2)
    return medians[edge], medians[draws - 1 - edge]
