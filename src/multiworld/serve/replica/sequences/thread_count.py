"""Number of threads of the next step: one, while other processes use the cores.

The threads of a computation wait for each other after every matrix product, and spin
meanwhile, as OpenMP's do. If another process takes a core, the other threads spin until
the slowest one is done. Beside one busy process, two threads on two cores computed less
than one token a second instead of 86; one thread computed 61.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.25  # minimum seconds between two checks
# Cores are crowded if a thread waits for one during this fraction of the time.
CROWDED = 0.15
# Initial and maximum seconds of computing with one thread before all threads are tried
# again. The time doubles while the cores are crowded, because each trial may cost a
# slow step or two.
PAUSE_S, MAX_PAUSE_S = 4.0, 64.0

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Nanoseconds that the calling thread ran, and waited for a core (proc(5))."""


def waited_s() -> float:
    """Return how long the calling thread has waited for a core; 0: not known."""
    try:
        return int(SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class ThreadCount:
    """Decides how many threads compute."""

    def __init__(
        self,
        threads: int,  # while the cores are free
        # Returns how long the computing thread has waited for a core.
        waited: Callable[[], float] = waited_s,
    ) -> None:
        self._threads, self._read_waited = threads, waited
        self._count = threads
        self._looked_at = self._waited = self._again_at = 0.0
        self._pause_s = PAUSE_S

    def next(self, now: float) -> int:
        """Return the number of threads of a step that begins now (monotonic)."""
        passed = now - self._looked_at
        if passed < LOOK_S:
            return self._count
        waited = self._read_waited()
        share = (waited - self._waited) / passed
        is_first, self._looked_at, self._waited = not self._looked_at, now, waited
        if is_first:
            return self._count
        if self._count < self._threads:
            if now >= self._again_at:
                self._count = self._threads
        elif share > CROWDED:
            self._count = 1
            self._again_at = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        elif now - self._again_at > self._pause_s:
            self._pause_s = PAUSE_S
        return self._count
