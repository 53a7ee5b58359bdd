"""Polling time before a receive parks (lets the event loop run until its message has
come), learned from earlier waits. Pure. Parking costs as much as several round trips of
a Unix socket. How soon a message comes depends on the processor and on the peer."""

from __future__ import annotations

# Limits of the polling time in seconds. On two cores, longer polling starves the peer.
MIN_SPIN_S, MAX_SPIN_S = 50e-6, 200e-6
# Poll only if the last parked wait was at most this long. Parking turns a wait of 30 µs
# into one of 200 µs.
SHORT_WAIT_S = 500e-6
SHARE = 0.2  # weight of the latest wait in the average
GIVE_UP = 4  # polls in a row that find no message, after which polling pauses
# Minimum and maximum length of a pause, as a number of parked waits; each pause is
# twice as long as the one before.
MIN_PAUSE, MAX_PAUSE = 64, 4096


class Spin:
    """The waits of one channel."""

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
        self._in_vain, self._next_pause = 0, MIN_PAUSE
        self._average_s += SHARE * (took_s - self._average_s)
        self._limit_s = max(MIN_SPIN_S, 2 * self._average_s)

    def missed(self) -> None:
        self._in_vain += 1
        # Poll longer next time: the message may have come a little later.
        self._limit_s = min(MAX_SPIN_S, 2 * self._limit_s)
        if self._in_vain == GIVE_UP:
            self._in_vain, self._limit_s = 0, MIN_SPIN_S
            self._pause = self._next_pause
            self._next_pause = min(2 * self._pause, MAX_PAUSE)

    def parked(self, wait_s: float) -> None:
        self._is_short = wait_s <= SHORT_WAIT_S
        self._pause = max(0, self._pause - 1)
