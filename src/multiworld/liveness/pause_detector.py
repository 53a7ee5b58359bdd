"""Detection of this process's own pauses. Pure."""

from __future__ import annotations

import math

# Minimum seconds of a pause; on a busy machine, shorter delays are normal.
LATE_S = 0.25


class PauseDetector:
    """Detects that this process was stopped, suspended or blocked. Messages that
    arrived in that time are still unread, so silence counts from ``resumed_at``, and
    the check that detects the pause must declare no peer lost."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._looked_at = math.inf
        self._late_s = 0.0
        self.resumed_at = -math.inf

    def look(self, now: float) -> bool:
        """Return True if the process was paused since the last look."""
        late_s = now - self._looked_at - self._period_s
        before_s, self._late_s = self._late_s, late_s if late_s > LATE_S else 0.0
        self._looked_at = now
        # If the previous look was at least half as late, the process is not paused but
        # slow, and must still judge its peers.
        if self._late_s <= 2 * before_s:
            return False
        self.resumed_at = now
        return True

    @property
    def late_s(self) -> float:
        """Seconds by which the last look was late; 0 if that was at most ``LATE_S``."""
        return self._late_s

    def rest(self) -> None:
        """Expect the next look at any time, however late."""
        self._looked_at = math.inf
