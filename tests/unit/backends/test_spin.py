"""Spin: it follows the waits, and stops where polling finds nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.backends.spin import (
    GIVE_UP,
    MAX_PAUSE,
    MAX_SPIN_S,
    MIN_PAUSE,
    MIN_SPIN_S,
    SHORT_WAIT_S,
    Spin,
)


def play(spin: Spin, wait_s: float, count: int) -> tuple[int, float]:
    """Play ``count`` waits; return the polls that hit, and seconds of vain polling."""
    found, in_vain_s = 0, 0.0
    for _ in range(count):
        seconds = spin.seconds
        if wait_s <= seconds:
            spin.hit(wait_s)
            found += 1
            continue
        if seconds:
            spin.missed()
            in_vain_s += seconds
        spin.parked(wait_s + 200e-6)
    return found, in_vain_s


def test_nobody_polls_before_a_wait_was_short() -> None:
    """An idle program must sleep."""
    spin = Spin()
    assert play(spin, 1.0, 100) == (0, 0.0)
    spin.parked(SHORT_WAIT_S)
    assert spin.seconds == MIN_SPIN_S
    spin.parked(2 * SHORT_WAIT_S)
    assert spin.seconds == 0.0


@pytest.mark.parametrize("wait_us", [5, 30, 60, 90, 120, 180])
def test_short_waits_are_found_on_any_processor(wait_us: int) -> None:
    """Some processors take three times as long as others."""
    spin = Spin()
    found, _ = play(spin, wait_us * 1e-6, 1000)
    assert found > 990
    assert MIN_SPIN_S <= spin.seconds <= MAX_SPIN_S


def test_polling_in_vain_is_rare() -> None:
    """Waits are short, but longer than polling may take."""
    spin = Spin()
    found, in_vain_s = play(spin, 290e-6, 10_000)
    assert found == 0
    assert in_vain_s < 0.002 * 10_000 * 290e-6


def test_polling_starts_again_when_waits_get_shorter() -> None:
    """Polling resumes after a pause, however long it had been in vain."""
    spin = Spin()
    play(spin, 290e-6, 100_000)
    found, _ = play(spin, 30e-6, 2 * MAX_PAUSE)
    assert found > MAX_PAUSE - MIN_PAUSE
    assert play(spin, 30e-6, 1000)[0] == 1000


@given(
    st.lists(
        st.one_of(
            st.floats(0, 1).map(lambda s: ("hit", s)),
            st.just(("missed", 0.0)),
            st.floats(0, 10).map(lambda s: ("parked", s)),
        )
    )
)
def test_limit_stays_within_its_bounds(steps: list[tuple[str, float]]) -> None:
    spin = Spin()
    in_a_row = 0
    for what, seconds in steps:
        if what == "missed":
            spin.missed()
            in_a_row += 1
        elif what == "hit":
            spin.hit(seconds)
            in_a_row = 0
        else:
            spin.parked(seconds)
        assert spin.seconds == 0.0 or MIN_SPIN_S <= spin.seconds <= MAX_SPIN_S
        if in_a_row == GIVE_UP:
            assert spin.seconds == 0.0
            in_a_row = 0
