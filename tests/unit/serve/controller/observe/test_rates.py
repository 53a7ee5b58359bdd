"""Rates and quantiles from counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.controller.observe.rates import (
    QUANTILE_S,
    Label,
    Window,
    quantile,
)

COUNT: Label = ("requests", ("m", "200"))


def test_rate_is_of_the_last_seconds() -> None:
    window = Window()
    for second in range(120):
        count = 100.0 * min(second, 100)  # nothing more from second 100 on
        window.seen({COUNT: count}, float(second))
        if second == 90:
            assert window.rates("requests") == {("m", "200"): 100.0}
    assert window.rates("requests") == {}


def test_first_sample_has_no_rate() -> None:
    window = Window()
    window.seen({COUNT: 5.0}, 0.0)
    assert window.rates("requests") == {}


def test_new_count_began_at_zero() -> None:
    window = Window()
    window.seen({}, 0.0)
    window.seen({COUNT: 6.0}, 2.0)
    assert window.rates("requests") == {("m", "200"): 3.0}


def test_quantiles_are_of_the_last_minute() -> None:
    window = Window()
    slow, fast = ("x_buckets", ("m", "10")), ("x_buckets", ("m", "0.1"))
    window.seen({slow: 1000.0, fast: 0.0}, 0.0)
    window.seen({slow: 1000.0, fast: 0.0}, 1.0)
    window.seen({slow: 1000.0, fast: 50.0}, QUANTILE_S)
    assert window.quantiles("x_buckets", "m", (0.5,)) == [pytest.approx(0.05)]
    assert window.quantiles("x_buckets", "other", (0.5,)) == []


def test_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile([(1.0, 0.0), (30.0, 1.0), (float("inf"), 9.0)], 0.9) == 30.0


@given(st.lists(st.floats(0, 9.9), min_size=1), st.floats(0.01, 1.0))
def test_quantile_lies_in_its_bucket(values: list[float], share: float) -> None:
    bounds = [float(n) for n in range(1, 11)]
    counts = [(b, float(sum(b - 1 <= v < b for v in values))) for b in bounds]
    true = sorted(values)[max(0, -(-int(share * len(values) * 10**6) // 10**6) - 1)]
    found = quantile(counts, share)
    assert true - 1 <= found <= true + 1
