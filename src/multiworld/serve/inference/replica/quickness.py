"""Test of whether a stage is quick enough to run on the event loop. Pure."""

from __future__ import annotations

WARM = 20
"""Minimum number of measured batches."""

QUICK_S = 0.0005
"""Maximum mean seconds of a batch."""

SLOW_S = 0.005
"""Seconds of a batch after which the stage counts as slow for ``WARM`` batches more."""

SHARE = 0.1
"""Weight of the latest batch in the moving average."""


class Quickness:
    """Exponential moving average of a stage's computing time.

    A quick stage computes on the event loop, which saves passing each batch to a thread
    and back, and its batches are not announced before they are computed.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._measured = 0
        self._is_forbidden = False

    def forbid(self) -> None:
        """Count as slow from now on."""
        self._is_forbidden = True

    @property
    def is_quick(self) -> bool:
        is_little = self._measured >= WARM and self._mean_s <= QUICK_S
        return is_little and not self._is_forbidden

    def add(self, took_s: float) -> None:
        if took_s > SLOW_S:
            self._measured = 0
            self._mean_s = 0.0
            return
        self._measured += 1
        share = max(SHARE, 1 / self._measured)
        self._mean_s += share * (took_s - self._mean_s)
