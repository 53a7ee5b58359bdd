"""A clock that moves only when it is told to."""

from __future__ import annotations


class FakeClock:
    """Monotonic seconds under a test's control; give ``clock.now`` to pure code."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> float:
        """Let time pass; return the new time.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError("a monotonic clock does not go back")
        self.now += seconds
        return self.now
