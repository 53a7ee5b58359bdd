"""Buffer for messages about incarnations that this process does not know yet. Pure.

Members learn of a new incarnation one after another, so messages may arrive early.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Where = TypeVar("Where")
What = TypeVar("What")

LIMIT_BYTES = 1024 * 1024
"""Approximate maximum of bytes kept per origin. It bounds the cost of a misbehaving
peer without taking space from the others."""

MESSAGE_BYTES = 256
"""Approximate bytes of a message without its strings."""

KEPT_S = 60.0
"""Seconds that messages are kept."""


@dataclass(slots=True)
class _Box(Generic[Where, What]):
    since: float
    messages: list[tuple[Where, What, int]] = field(default_factory=list)


class EarlyMessages(Generic[Where, What]):
    """Messages by incarnation and origin."""

    def __init__(self) -> None:
        self._boxes: dict[int, _Box[Where, What]] = {}
        self._kept: Counter[Where] = Counter()

    def keep(
        self, nonce: int, where: Where, what: What, now: float, texts: int = 0
    ) -> None:
        """Keep a message with ``texts`` bytes of strings, unless its origin is full."""
        cost = MESSAGE_BYTES + texts
        if self._kept[where] + cost <= LIMIT_BYTES:
            box = self._boxes.setdefault(nonce, _Box(now))
            box.messages.append((where, what, cost))
            self._kept[where] += cost

    def take(self, nonce: int, where: Where) -> list[What]:
        """Remove and return the messages of one incarnation and origin, in order."""
        box = self._boxes.get(nonce)
        if box is None:
            return []
        due = [entry for entry in box.messages if entry[0] == where]
        box.messages = [entry for entry in box.messages if entry[0] != where]
        self._forget(due)
        return [what for _, what, _ in due]

    def drop(self, nonce: int) -> None:
        box = self._boxes.pop(nonce, None)
        if box is not None:
            self._forget(box.messages)

    def _forget(self, entries: list[tuple[Where, What, int]]) -> None:
        for where, _, cost in entries:
            self._kept[where] -= cost
            if not self._kept[where]:
                del self._kept[where]

    def purge(self, now: float) -> None:
        """Drop the messages of incarnations first heard of over ``KEPT_S`` ago."""
        for nonce, box in list(self._boxes.items()):
            if now - box.since > KEPT_S:
                self.drop(nonce)
