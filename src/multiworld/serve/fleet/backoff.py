"""How long to wait before something that crashed is started again. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

FREE_FAILURES = 2
"""Failures in a row that cost no wait: a fault is replaced at once, a loop is not."""

FIRST_S = 0.5
LAST_S = 30.0
"""The waits double from the first to the last."""

LAST_READY_S = 2.0
"""The last for what was ready: it may have been killed from outside, and requests wait
for its replacement."""

STABLE_S = 10.0
"""What was ready for that long has not crashed because of what it is."""


@dataclass(slots=True)
class _Count:
    failures: int = 0
    not_before: float = 0.0


class CrashBackoff:
    """Counts the failures of each post."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Count] = {}

    def record_failure(self, key: Hashable, ready_s: float | None, now: float) -> float:
        """Take note of a crash; return how long its replacement waits, in seconds.

        Args:
            post: What crashed.
            ready_s: For how long it had been ready; None if it never was.
            now: Monotonic seconds.
        """
        count = self._counts.setdefault(key, _Count())
        if ready_s is not None and ready_s >= STABLE_S:
            count.failures = 0
        count.failures += 1
        pause_s = 0.0
        if count.failures > FREE_FAILURES:
            last_s = LAST_S if ready_s is None else LAST_READY_S
            pause_s = min(
                last_s, FIRST_S * 2.0 ** min(count.failures - FREE_FAILURES - 1, 10)
            )
        count.not_before = now + pause_s
        return pause_s

    def forget(self, key: Hashable) -> None:
        """Forget the failures of a post."""
        self._counts.pop(key, None)

    def failures(self, key: Hashable) -> int:
        """Return how often in a row it has crashed."""
        count = self._counts.get(key)
        return 0 if count is None else count.failures

    def not_before(self, key: Hashable) -> float:
        """Return when it may be started again."""
        count = self._counts.get(key)
        return 0.0 if count is None else count.not_before
