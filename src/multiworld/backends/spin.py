"""Length of polling before a receive parks, learnt from earlier waits. Pure.

Parking until the selector wakes the receive costs as much as several round trips of a
Unix socket, so a receive that will be served soon polls instead. How soon that is
depends on the processor and on the peer's program. So the limit follows the result of
earlier polls, and polling stops for a while when it finds nothing.
"""

from __future__ import annotations

MIN_SPIN_S, MAX_SPIN_S = 50e-6, 200e-6
"""Minimum and maximum seconds to poll. On two cores, longer polling starves the
peer."""

SHORT_WAIT_S = 500e-6
"""Maximum length of a parked wait, in seconds, after which the next receive polls.
Parking turns a wait of 30 µs into one of 200 µs."""

SHARE = 0.2
"""Weight of the latest wait in the average."""

GIVE_UP = 4
"""Consecutive polls in vain after which polling stops for a while."""

MIN_PAUSE, MAX_PAUSE = 64, 4096
"""Initial and maximum number of parked waits without polling; it doubles each time."""


class Spin:
    """The waits of one channel. Polls that find their message set the limit to twice
    their average. A poll in vain doubles it, because the message may come a little
    later."""

    def __init__(self) -> None:
        self._limit_s = MIN_SPIN_S
        self._average_s = 0.0
        self._is_short = False
        self._in_vain = 0
        self._pause, self._next_pause = 0, MIN_PAUSE

    @property
    def seconds(self) -> float:
        """Seconds for which the next receive may poll; 0 if it parks at once."""
        if not self._is_short or self._pause:
            return 0.0
        return min(self._limit_s, MAX_SPIN_S)

    def hit(self, took_s: float) -> None:
        """Record the seconds after which a poll found its message."""
        self._in_vain, self._next_pause = 0, MIN_PAUSE
        self._average_s += SHARE * (took_s - self._average_s)
        self._limit_s = max(MIN_SPIN_S, 2 * self._average_s)

    def missed(self) -> None:
        """Record that a poll found nothing."""
        self._in_vain += 1
        self._limit_s = min(MAX_SPIN_S, 2 * self._limit_s)
        if self._in_vain == GIVE_UP:
            self._in_vain, self._limit_s = 0, MIN_SPIN_S
            self._pause = self._next_pause
            self._next_pause = min(2 * self._pause, MAX_PAUSE)

    def parked(self, wait_s: float) -> None:
        """Record the length of a parked wait."""
        self._is_short = wait_s <= SHORT_WAIT_S
        self._pause = max(0, self._pause - 1)
