"""A fake clock, which moves only when a test advances it. Pure."""

from __future__ import annotations


class FakeClock:
    """Monotonic clock under a test's control.

    Args:
        now: Initial value of ``now``, the current time in seconds.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def advance(self, seconds: float) -> float:
        """Advance the clock.

        Args:
            seconds: Time to add.

        Returns:
            The new time in seconds.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError("a monotonic clock cannot go back; pass seconds >= 0")
        self.now += seconds
        return self.now
