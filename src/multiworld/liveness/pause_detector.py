"""Detection of this process's own pauses. Pure."""

from __future__ import annotations

import math

LATE_S = 0.25
"""Seconds by which a look is late at least when the process was paused; a busy machine
delays it by less."""


class PauseDetector:
    """Finds the pauses of a process: it was stopped, suspended, or its loop blocked.

    What others sent during such a pause is still to be read, so nobody is judged by it:
    whoever measures a silence measures it from ``resumed_at``, and judges nobody in
    the look that finds a pause.

    Args:
        period_s: Seconds between two looks.

    Attributes:
        resumed_at: End of the last pause, as a monotonic time; minus infinity if there
            was none.
    """

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._looked_at = math.inf
        self._was_late = False
        self.resumed_at = -math.inf

    def look(self, now: float) -> bool:
        """Return True if the process was paused since the last look.

        A process that is late at every look must judge all the same: of looks that are
        late one after the other, only the first one counts as a pause.

        Args:
            now: Monotonic time in seconds.
        """
        late_s = now - self._looked_at - self._period_s
        was_late, self._was_late = self._was_late, late_s > LATE_S
        self._looked_at = now
        if not self._was_late or was_late:
            return False
        self.resumed_at = now
        return True

    def rest(self) -> None:
        """Record that the next look comes when it is needed, however late."""
        self._looked_at = math.inf
