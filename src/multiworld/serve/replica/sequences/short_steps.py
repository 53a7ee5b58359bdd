"""Detection of steps short enough for the event loop to compute itself. Pure.

A step in the compute thread costs two wake-ups: of the thread, and of the event loop
after the step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

# Maximum seconds for which a step may block the event loop. Heartbeats continue
# meanwhile.
SHORT_S = 0.02
# Number of steps of a size to measure before one is computed on the event loop.
WARM = 4
DECAY = 0.9  # factor by which each further step reduces the longest measured duration


@dataclass(slots=True)
class _Size:
    count: int = 0
    longest_s: float = 0.0


class ShortSteps:
    """Durations of steps, by number of rows, rounded up to a power of two."""

    def __init__(self) -> None:
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)

    def is_short(self, rows: int) -> bool:
        size = self._sizes[(rows - 1).bit_length()]
        return size.count >= WARM and size.longest_s <= SHORT_S

    def add(self, rows: int, took_s: float) -> None:
        size = self._sizes[(rows - 1).bit_length()]
        size.count += 1
        size.longest_s = max(took_s, DECAY * size.longest_s)
