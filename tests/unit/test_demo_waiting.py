"""Patience of the demos: they wait as long as anything moves."""

from __future__ import annotations

from multiworld.demo.pipeline.patience import STILL_S, TELL_S, Patience


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_patience_lasts_as_long_as_something_moves() -> None:
    """However long that is; then for a minute."""
    clock = Clock()
    patience = Patience(clock)
    for number in range(10):
        clock.now += STILL_S
        assert patience.look(number)
    clock.now += STILL_S
    assert patience.look(9)
    clock.now += 0.1
    assert not patience.look(9)


def test_it_is_told_now_and_then_what_is_waited_for() -> None:
    """Not at each look."""
    clock = Clock()
    patience = Patience(clock)
    assert not patience.is_time_to_tell()
    clock.now += TELL_S
    assert patience.is_time_to_tell()
    assert not patience.is_time_to_tell()
