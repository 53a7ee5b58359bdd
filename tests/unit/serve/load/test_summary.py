"""Quantiles and counts of a load run."""

from __future__ import annotations

import math

import pytest

from multiworld.serve.load.summary import Sample, quantile, summarise


def test_summary_counts_what_was_lost_and_wrong() -> None:
    """Latencies are those of answered requests only."""
    samples = [Sample(0, n / 100, 200, True) for n in range(1, 101)]
    samples += [Sample(0, 9.0, 503, error="no"), Sample(0, 9.0, 0, error="cut")]
    samples += [Sample(0, 0.5, 200, False)]
    found = summarise(samples)
    assert (found.sent, found.answered, found.failed, found.wrong) == (103, 101, 2, 1)
    assert found.statuses == {0: 1, 200: 101, 503: 1}
    assert found.p99_s == pytest.approx(0.99, abs=0.011)
    assert quantile([3, 1, 2], 0.5) == 2
    assert math.isnan(quantile([], 0.5))
