"""Backoff before a crashed process restarts. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

# This many consecutive crashes cause no backoff; more are a crash loop.
FREE_FAILURES = 2

FIRST_S = 0.5  # seconds of the first backoff; each further crash doubles it
LAST_S = 30.0  # maximum backoff, in seconds, if the process was never ready

# Maximum backoff, in seconds, after the crash of a ready process. It is short, because
# the cause may be external, and because requests wait for the replacement.
LAST_READY_S = 2.0

# Seconds of readiness after which a crashed process is replaced at once, even in a
# crash loop. A start takes about a second, so the stage is ready most of the time, and
# requests may be waiting for it.
BRIEF_S = 3.0

STABLE_S = 10.0  # a process that was ready for this many seconds ends a crash loop


@dataclass(slots=True)
class Crashes:
    """The latest consecutive crashes of the processes with one key."""

    failures: int = 0
    not_before: float = 0.0  # earliest monotonic time of the next replacement
    cause: str = ""
    same: int = 0  # number of latest consecutive crashes with this ``cause``


class CrashBackoff:
    def __init__(self) -> None:
        self._counts: dict[Hashable, Crashes] = {}

    def of(self, key: Hashable) -> Crashes:
        return self._counts.get(key) or Crashes()

    def record_failure(
        self, key: Hashable, ready_s: float | None, now: float, cause: str = ""
    ) -> float:
        """Record a crash after ``ready_s`` (None: never ready); return the backoff."""
        count = self._counts.setdefault(key, Crashes())
        is_same = ready_s is None and cause == count.cause
        count.same = count.same + 1 if is_same else 1
        count.cause = cause
        if ready_s is not None and ready_s >= STABLE_S:
            count.failures = 0
        count.failures += 1
        pause_s = 0.0
        is_brief = ready_s is None or ready_s < BRIEF_S
        if is_brief and count.failures > FREE_FAILURES:
            last_s = LAST_S if ready_s is None else LAST_READY_S
            pause_s = min(
                last_s, FIRST_S * 2.0 ** min(count.failures - FREE_FAILURES - 1, 10)
            )
        count.not_before = now + pause_s
        return pause_s

    def forget(self, key: Hashable) -> None:
        self._counts.pop(key, None)
