"""Backoff after crashes."""

from __future__ import annotations

from multiworld.serve.controller.fleet.backoff import (
    BRIEF_S,
    FREE_FAILURES,
    LAST_READY_S,
    LAST_S,
    CrashBackoff,
)


def test_backoff_grows_with_crashes_and_resets_after_stable_runs() -> None:
    backoff = CrashBackoff()
    pauses = [backoff.record_failure("p", None, 10.0) for _ in range(FREE_FAILURES + 9)]
    assert pauses[:FREE_FAILURES] == [0.0] * FREE_FAILURES
    assert pauses[FREE_FAILURES : FREE_FAILURES + 3] == [0.5, 1.0, 2.0]
    assert max(pauses) == LAST_S
    assert backoff.of("p").not_before == 10.0 + LAST_S
    assert backoff.of("other").not_before == 0.0
    assert backoff.record_failure("p", 1.0, 50.0) == LAST_READY_S
    many = backoff.of("p").failures
    assert backoff.record_failure("p", BRIEF_S, 70.0) == 0.0, "it was there for a while"
    assert backoff.of("p").failures == many + 1, "but it still counts as a crash loop"
    assert backoff.record_failure("p", 60.0, 100.0) == 0.0
    assert backoff.of("p").failures == 1
