"""Backoff after crashes."""

from __future__ import annotations

from multiworld.serve.fleet.backoff import (
    FREE,
    LAST_READY_S,
    LAST_S,
    CrashBackoff,
)


def test_crash_guard_waits_longer_each_time_and_forgets_what_was_sound() -> None:
    """A fault is replaced at once, a loop is not."""
    guard = CrashBackoff()
    pauses = [guard.failed("p", None, 10.0) for _ in range(FREE + 9)]
    assert pauses[:FREE] == [0.0] * FREE
    assert pauses[FREE : FREE + 3] == [0.5, 1.0, 2.0]
    assert max(pauses) == LAST_S
    assert guard.not_before("p") == 10.0 + LAST_S
    assert guard.not_before("other") == 0.0
    assert guard.failed("p", 1.0, 50.0) == LAST_READY_S
    assert guard.failed("p", 60.0, 100.0) == 0.0
    assert guard.failures("p") == 1
