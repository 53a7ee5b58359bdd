"""Demand of a model, now and soon, estimated from recent samples. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.controller.scaling.snapshot import Sample

SIGMAS = 3.0  # standard deviations of a Poisson process that a burst must exceed
BURST_SHARE = 6  # divisor of the look-back period that gives the burst window
# Minimum number of sampling intervals over which a rate is measured, so that the first
# requests do not look like a burst.
MIN_INTERVALS = 3
TREND_PERIODS = 2.0  # look-back periods over which a trend is fitted
BINS = 8  # points of the trend's linear regression

# Minimum ratio of a slope to its standard error (Student's t with six degrees of
# freedom, two-sided 5 %).
MIN_T = 2.5

MAX_GROWTH = 2.0  # maximum expected demand, as a multiple of the current demand


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand in arrivals per second."""

    # Requests/s over the look-back period; in a burst, over the burst window.
    rate: float
    expected: float  # rate in ``ahead_s`` seconds, when a replica started now is ready
    ahead_s: float = 0.0
    slope: float = 0.0  # change of ``rate`` per second; 0 if not significant
    is_burst: bool = False

    @property
    def is_rising(self) -> bool:
        return self.is_burst or self.slope > 0


def sample_at(samples: Sequence[Sample], at: float) -> Sample:
    """Return the last sample taken at or before ``at``, or else the first one."""
    found = bisect.bisect_right([sample.at for sample in samples], at + 1e-9)
    return samples[max(0, found - 1)]


def rate_between(first: Sample, last: Sample) -> float:
    span_s = last.at - first.at
    return (last.arrived - first.arrived) / span_s if span_s > 0 else 0.0


def demand_of(
    samples: Sequence[Sample], look_back_s: float, ahead_s: float, interval_s: float
) -> Demand:
    """Return the current demand and the demand expected ``ahead_s`` from now."""
    last = samples[-1]
    first = sample_at(samples, last.at - look_back_s)

    min_span_s = min(look_back_s, MIN_INTERVALS * interval_s)
    rate = (last.arrived - first.arrived) / max(last.at - first.at, min_span_s)
    burst = _burst(samples, rate, look_back_s, interval_s)
    now = max(rate, burst)
    slope = _slope(samples, TREND_PERIODS * look_back_s)
    # ``now`` is an average over a period, so it is the rate at the period's midpoint,
    # ``behind_s`` ago. In a burst, the period is short enough to ignore that.
    behind_s = 0.0 if burst else look_back_s / 2
    ahead_s = min(ahead_s, look_back_s)
    expected = now + slope * (ahead_s + behind_s)
    return Demand(
        now,
        min(max(now, expected), MAX_GROWTH * now),
        ahead_s,
        slope,
        is_burst=burst > 0.0,
    )


def envelope(samples: Sequence[Sample], period_s: float, max_wait_s: float) -> float:
    """Return the minimum requests/s that would have kept waits to ``max_wait_s``."""
    # Requests that arrive within any ``w`` seconds must be computed within ``w +
    # max_wait_s``: the measured arrival curve of network calculus (Cruz, "A calculus
    # for network delay", IEEE Transactions on Information Theory 37, 1991).
    first = bisect.bisect_left([s.at for s in samples], samples[-1].at - period_s)
    lately = samples[max(0, first - 1) :]
    highest = 0.0
    for width in _widths(len(lately)):
        for one, other in zip(lately, lately[width:], strict=False):
            came, span_s = other.arrived - one.arrived, other.at - one.at
            highest = max(highest, came / (span_s + max_wait_s))
    return highest


def _widths(count: int) -> list[int]:
    """Return the window widths 1, 2, 3, 4, 6, 8, 12, … below ``count``."""
    found = [1]
    while found[-1] + max(1, found[-1] // 2) < count:
        found.append(found[-1] + max(1, found[-1] // 2))
    return found


def _burst(
    samples: Sequence[Sample], rate: float, look_back_s: float, interval_s: float
) -> float:
    """Return the arrival rate of a burst; 0 if recent arrivals may be chance."""
    last = samples[-1]
    short_s = max(look_back_s / BURST_SHARE, 2 * interval_s)
    if short_s >= look_back_s:
        return 0.0
    first = sample_at(samples, last.at - short_s)
    before = sample_at(samples, last.at - look_back_s)
    came, span_s = last.arrived - first.arrived, last.at - first.at
    usual = rate_between(before, first) * span_s
    if came <= usual + SIGMAS * math.sqrt(max(usual, 1.0)) + 1.0:
        return 0.0
    return came / span_s if span_s > 0 else rate


def _slope(samples: Sequence[Sample], period_s: float) -> float:
    """Return the slope of the arrival rate; 0 unless it is significant."""
    last = samples[-1]
    begin = max(samples[0].at, last.at - period_s)
    width_s = (last.at - begin) / BINS
    if width_s <= 0 or last.at - begin < period_s / 2:
        return 0.0
    edges = [sample_at(samples, begin + n * width_s) for n in range(BINS + 1)]
    pairs = list(itertools.pairwise(edges))
    if any(one.at >= other.at for one, other in pairs):
        return 0.0
    xs = [(one.at + other.at) / 2 for one, other in pairs]
    ys = [rate_between(one, other) for one, other in pairs]
    mean_x, mean_y = sum(xs) / BINS, sum(ys) / BINS
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = (
        sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    )
    rest = sum(
        (y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True)
    )
    # Assume at least the variance of a Poisson process.
    noise = max(rest / (BINS - 2), mean_y / width_s)
    error = math.sqrt(noise / spread)
    return slope if abs(slope) > MIN_T * error else 0.0
