"""Measured numbers, with their ratios and intervals."""

from __future__ import annotations

import random

import pytest

from benchmarks.samples import BenchReport, interval


def report() -> BenchReport:
    made = BenchReport("s", "base")
    for ours, theirs in ((30.0, 10.0), (20.0, 10.0), (60.0, 15.0)):
        made.add("stream", 64, "ours", "messages/s", ours)
        made.add("stream", 64, "base", "messages/s", theirs)
        made.add("trip", 64, "ours", "us", theirs)
    return made


def test_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    found = report()
    ours = found.find("stream", 64, "ours")
    assert ours is not None
    assert found.ratios(ours) == [3.0, 2.0, 4.0]
    assert found.ratio(ours) == 3.0
    assert ours.median == 30.0


def test_worst_of_a_rate_is_the_lowest_and_of_a_time_the_highest() -> None:
    found = report()
    rate, trip = found.find("stream", 64, "ours"), found.find("trip", 64, "ours")
    assert rate is not None
    assert trip is not None
    assert (rate.worst, trip.worst) == (20.0, 15.0)


def test_no_ratio_without_a_baseline() -> None:
    found = report()
    trip = found.find("trip", 64, "ours")
    assert trip is not None
    assert found.ratio(trip) is None
    found.add("zero", 1, "ours", "times", 1.0)
    found.add("zero", 1, "base", "times", 0.0)
    zero = found.find("zero", 1, "ours")
    assert zero is not None
    assert found.ratio(zero) is None


def test_interval_holds_the_median_and_shrinks_with_samples() -> None:
    source = random.Random(3)
    many = [source.gauss(10, 1) for _ in range(200)]
    low, high = interval(many)
    assert low < 10.1
    assert high > 9.9
    few_low, few_high = interval(many[:10])
    assert few_high - few_low > high - low
    assert interval(many) == pytest.approx((low, high))
