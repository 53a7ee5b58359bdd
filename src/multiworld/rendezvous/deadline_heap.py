"""Deadlines by key, with fast access to the earliest one. Pure. An outdated entry stays
in the heap until it reaches the top, or until most entries are outdated."""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

Key = TypeVar("Key")

# The heap is rebuilt when its outdated entries exceed the current ones by this number.
SPARE = 64


class Deadlines(Generic[Key]):
    """Deadlines by key. Each operation takes logarithmic time, amortized."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int, Key]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._numbers = itertools.count()

    def set(self, key: Key, at: float) -> None:
        entry = self._entries[key] = (at, next(self._numbers), key)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + SPARE:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        self._entries.pop(key, None)

    def next(self) -> float | None:
        while self._heap and self._entries.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[Key]:
        """Remove the keys whose deadline has passed; return them, earliest first."""
        due: list[Key] = []
        while (at := self.next()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._entries[key]
            due.append(key)
        return due
