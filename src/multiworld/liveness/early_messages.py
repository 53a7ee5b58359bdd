"""Messages that came before their addressee was known. Pure.

The store tells the members of a new incarnation one after the other, so that one of
them may speak of it before another has heard of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Where = TypeVar("Where")
What = TypeVar("What")

LIMIT = 4096
"""Most messages kept; a peer that speaks of what never comes costs no more."""

KEPT_S = 60.0
"""Seconds that they are kept."""


@dataclass(slots=True)
class _Box(Generic[Where, What]):
    since: float
    messages: list[tuple[Where, What]] = field(default_factory=list)


class EarlyMessages(Generic[Where, What]):
    """Messages by incarnation, and by where they came from."""

    def __init__(self) -> None:
        self._boxes: dict[int, _Box[Where, What]] = {}
        self._count = 0

    def keep(self, nonce: int, where: Where, what: What, now: float) -> None:
        """Keep a message, unless there are too many already."""
        if self._count < LIMIT:
            box = self._boxes.setdefault(nonce, _Box(now))
            box.messages.append((where, what))
            self._count += 1

    def take(self, nonce: int, where: Where) -> list[What]:
        """Return what came from there for an incarnation that is known now."""
        box = self._boxes.get(nonce)
        if box is None:
            return []
        due = [what for origin, what in box.messages if origin == where]
        box.messages = [entry for entry in box.messages if entry[0] != where]
        self._count -= len(due)
        return due

    def drop(self, nonce: int) -> None:
        """Forget what was kept for an incarnation."""
        box = self._boxes.pop(nonce, None)
        if box is not None:
            self._count -= len(box.messages)

    def purge(self, now: float) -> None:
        """Forget what nobody asked for in time."""
        for nonce, box in list(self._boxes.items()):
            if now - box.since > KEPT_S:
                self.drop(nonce)
