"""Accounting of requests and answers; times are arguments. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field

Batch = int


@dataclass(slots=True)
class WorldAccount:
    """Work of one world.

    Attributes:
        state: State to show to a person.
        epoch: Latest epoch of the world.
        images: Images answered.
        in_flight: Batches sent and not answered, with the time when each was sent.
        answered_at: Times of the answers, in seconds.
    """

    state: str = "starting"
    epoch: int = 0
    images: int = 0
    in_flight: dict[Batch, float] = field(default_factory=dict)
    answered_at: list[float] = field(default_factory=list)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the seconds between consecutive answers from ``begin`` to ``end``.

        The first gap starts at the last answer before ``begin``, if there was one. The
        gap that is still open at ``end`` is left out.
        """
        times = [t for t in self.answered_at if begin <= t <= end]
        before = [t for t in self.answered_at if t < begin]
        times = before[-1:] + times
        return [late - early for early, late in itertools.pairwise(times)]


class RequestLedger:
    """Hands out batches of image numbers, and counts each answer exactly once.

    Batches of a lost world are handed out again before new ones.
    """

    def __init__(self, count: int, batch_size: int) -> None:
        self._count, self._batch_size = count, batch_size
        self._returned: deque[Batch] = deque()
        self._next = 0
        self._open: dict[Batch, list[int]] = {}
        self.worlds: dict[str, WorldAccount] = {}
        self.sent = self.answered = self.correct = self.resent = 0

    def take(self, world: str, now: float) -> tuple[Batch, list[int]]:
        """Return the next batch for ``world`` and its image numbers.

        Batches that were given back come first.

        Args:
            world: World that the batch is sent to.
            now: Time, in seconds.
        """
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
        """Record an answer; return its images, or None if it is a duplicate.

        Args:
            world: World that answered.
            batch: Number of the batch.
            now: Time, in seconds.
        """
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
        """Take a world's unanswered batches back for others; return their images."""
        account = self.worlds[world]
        images = sum(len(self._open.get(batch, ())) for batch in account.in_flight)
        self._returned.extendleft(reversed(account.in_flight))
        account.in_flight.clear()
        self.resent += images
        return images

    @property
    def has_returned(self) -> bool:
        """Whether batches that were given back wait for another world."""
        return bool(self._returned)

    @property
    def lost(self) -> int:
        """Number of images that were sent and not answered."""
        return self.sent - self.answered

    @property
    def accuracy(self) -> float:
        """Share of right answers, from 0 to 1."""
        return self.correct / self.answered if self.answered else 0.0


def percentile_99(values: list[float]) -> float:
    """Return the 99th percentile; 0 if there are no values."""
    if len(values) < 2:
        return max(values, default=0.0)
    return statistics.quantiles(values, n=100, method="inclusive")[98]
