"""Steps in flight: those that later stages do not return, and pauses of stage 0."""

from __future__ import annotations

from multiworld.serve.deadlines import GRACE_S
from multiworld.serve.replica.scheduling.steps_in_flight import StepsInFlight
from multiworld.serve.wire.generation_messages import StepPart

A, B = ("gateway/1", 1, 0), ("gateway/1", 2, 0)
MAX_S = 60.0


def begun(*keys: tuple[str, int, int]) -> StepsInFlight:
    steps = StepsInFlight(2)
    steps.begin([StepPart(key, 0, 1, samples=True) for key in keys])
    return steps


def looked(steps: StepsInFlight, *periods_s: float, is_paused: bool = False) -> float:
    """Check after each period; return the seconds until something is overdue."""
    now = 0.0
    for period_s in periods_s:
        now += period_s
        if is_paused:
            steps.excuse(now)
        if steps.overdue(now, MAX_S):
            return now
    raise AssertionError("nothing is overdue")


def test_step_that_does_not_return_is_overdue() -> None:
    steps = begun(A, B)
    assert 60 < looked(steps, *[GRACE_S] * 100) <= 63
    assert sorted(steps.overdue(100.0, MAX_S)) == [A, B]


def test_pause_of_this_process_does_not_count() -> None:
    """What arrived during the pause is still unread."""
    assert looked(begun(A), GRACE_S, 500.0, *[GRACE_S] * 100) > 550


def test_process_that_is_always_late_still_finds_faults() -> None:
    """Every second check comes late enough to look like a pause."""
    periods_s = [GRACE_S, 1.3 * GRACE_S] * 40
    assert looked(begun(A), *periods_s, is_paused=True) < 70


def test_sequence_whose_route_returned_without_it_is_missing() -> None:
    """A grace period allows for its end to arrive."""
    steps = begun(A, B)
    steps.record_missing(1, [("a",)], {A: ("a",), B: ("b",)}.__getitem__)
    assert not steps.is_waited_for(1, A)
    assert steps.is_waited_for(1, B)
    assert steps.overdue(1.0, MAX_S) == []
    steps.excuse(5.0)  # it was stopped
    assert steps.overdue(5.0, MAX_S) == []
    assert steps.overdue(5.0 + GRACE_S, MAX_S) == [A]
    steps.leave(A)
    assert steps.overdue(9.0, MAX_S) == []


def test_step_ends_with_its_last_sequence() -> None:
    steps = begun(A, B)
    steps.remove(1, A)
    assert len(steps) == 1
    steps.leave(B)
    assert len(steps) == 0
