"""Patience: waiting for as long as something moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

STILL_S = 60.0
"""Seconds without any change after which waiting is given up."""

TELL_S = 10.0
"""Seconds between two lines that say what is waited for."""


class Patience:
    """Ends when nothing has changed for ``STILL_S``, however long the whole takes.

    Args:
        clock: Returns the monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved_at = self._told_at = clock()
        self._seen: Hashable = None

    def look(self, seen: Hashable) -> bool:
        """Look at the present state; return False when patience is over.

        Args:
            seen: Anything that differs after a change.
        """
        now = self._clock()
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at <= STILL_S

    def is_time_to_tell(self) -> bool:
        """Return True every ``TELL_S`` seconds, to tell people what is waited for."""
        now = self._clock()
        if now - self._told_at < TELL_S:
            return False
        self._told_at = now
        return True
