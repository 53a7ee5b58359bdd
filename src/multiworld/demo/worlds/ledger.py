"""What was sent to whom, answered by whom, and when. Pure: times are arguments."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field

Batch = int


@dataclass(slots=True)
class WorldAccount:
    """One world's share of the work."""

    state: str = "starting"
    epoch: int = 0
    images: int = 0
    in_flight: dict[Batch, float] = field(default_factory=dict)
    answered_at: list[float] = field(default_factory=list)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the seconds between answers that came from ``begin`` to ``end``.

        The last gap is the one that was still open at ``end``, if answers were due.
        """
        times = [t for t in self.answered_at if begin <= t <= end]
        before = [t for t in self.answered_at if t < begin]
        times = before[-1:] + times
        return [late - early for early, late in itertools.pairwise(times)]


class RequestLedger:
    """Hands out batches of image numbers and takes the answers, each exactly once."""

    def __init__(self, count: int, batch_size: int) -> None:
        self._count, self._batch_size = count, batch_size
        self._returned: deque[Batch] = deque()
        self._next = 0
        self._open: dict[Batch, list[int]] = {}
        self.worlds: dict[str, WorldAccount] = {}
        self.sent = self.answered = self.correct = self.resent = 0

    def take(self, world: str, now: float) -> tuple[Batch, list[int]]:
        """Return a batch for ``world``: one that came back, else the next."""
        if self._returned:
            batch = self._returned.popleft()
        else:
            batch, begin = self._next, self._next * self._batch_size
            images = range(begin, begin + self._batch_size)
            self._open[batch] = [number % self._count for number in images]
            self._next += 1
            self.sent += self._batch_size
        self.worlds[world].in_flight[batch] = now
        return batch, self._open[batch]

    def answer(self, world: str, batch: Batch, now: float) -> list[int] | None:
        """Note an answer; return its images, or None if it was answered before."""
        account = self.worlds[world]
        account.in_flight.pop(batch, None)
        images = self._open.pop(batch, None)
        if images is None:
            return None
        account.images += len(images)
        account.answered_at.append(now)
        self.answered += len(images)
        return images

    def give_back(self, world: str) -> int:
        """Put a world's work in flight back, for others; return how many images."""
        account = self.worlds[world]
        images = sum(len(self._open.get(batch, ())) for batch in account.in_flight)
        self._returned.extendleft(reversed(account.in_flight))
        account.in_flight.clear()
        self.resent += images
        return images

    @property
    def has_returned(self) -> bool:
        """True while work that came back waits for another world."""
        return bool(self._returned)

    @property
    def lost(self) -> int:
        """Images that were sent and never answered."""
        return self.sent - self.answered

    @property
    def accuracy(self) -> float:
        """Share of answers that were right."""
        return self.correct / self.answered if self.answered else 0.0


def percentile_99(values: list[float]) -> float:
    """Return the 99th percentile, or 0 of nothing."""
    if len(values) < 2:
        return max(values, default=0.0)
    return statistics.quantiles(values, n=100, method="inclusive")[98]
