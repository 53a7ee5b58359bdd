"""Detection of this process's own pauses. Pure."""

from __future__ import annotations

import math

LATE_S = 0.25
"""Minimum lateness of a look, in seconds, that counts as a pause; a busy machine delays
it by less."""


class PauseDetector:
    """Detects pauses of this process: it was stopped or suspended, or its loop blocked.

    Messages that arrived during a pause are still unread, so silence must be measured
    from ``resumed_at``, and the look that finds a pause must judge nobody.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._looked_at = math.inf
        self._late_s = 0.0
        self.resumed_at = -math.inf

    def look(self, now: float) -> bool:
        """Return True if the process was paused since the last look.

        Of consecutive late looks one counts only if it is more than twice as late as
        the one before: a slow process must still judge.
        """
        late_s = now - self._looked_at - self._period_s
        before_s, self._late_s = self._late_s, late_s if late_s > LATE_S else 0.0
        self._looked_at = now
        if self._late_s <= 2 * before_s:
            return False
        self.resumed_at = now
        return True

    def rest(self) -> None:
        """Expect the next look at any time, however late."""
        self._looked_at = math.inf
