"""A buffer for messages of incarnations that this process does not know yet. Pure.

The store tells the members of a new incarnation one after the other. So one member may
send messages about it before another has heard of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Where = TypeVar("Where")
What = TypeVar("What")

LIMIT = 4096
"""Messages kept, at most, which bounds the cost of a misbehaving peer."""

KEPT_S = 60.0
"""Seconds that messages are kept."""


@dataclass(slots=True)
class _Box(Generic[Where, What]):
    since: float
    messages: list[tuple[Where, What]] = field(default_factory=list)


class EarlyMessages(Generic[Where, What]):
    """Messages by incarnation and origin."""

    def __init__(self) -> None:
        self._boxes: dict[int, _Box[Where, What]] = {}
        self._count = 0

    def keep(self, nonce: int, where: Where, what: What, now: float) -> None:
        """Keep a message, unless the buffer is full.

        Args:
            nonce: Nonce of the incarnation.
            where: Origin of the message.
            what: The message.
            now: Current time, in seconds on a monotonic clock.
        """
        if self._count < LIMIT:
            box = self._boxes.setdefault(nonce, _Box(now))
            box.messages.append((where, what))
            self._count += 1

    def take(self, nonce: int, where: Where) -> list[What]:
        """Remove and return the messages of one incarnation and origin, in order."""
        box = self._boxes.get(nonce)
        if box is None:
            return []
        due = [what for origin, what in box.messages if origin == where]
        box.messages = [entry for entry in box.messages if entry[0] != where]
        self._count -= len(due)
        return due

    def drop(self, nonce: int) -> None:
        """Drop the messages of an incarnation."""
        box = self._boxes.pop(nonce, None)
        if box is not None:
            self._count -= len(box.messages)

    def purge(self, now: float) -> None:
        """Drop the messages of incarnations first heard of over ``KEPT_S`` ago."""
        for nonce, box in list(self._boxes.items()):
            if now - box.since > KEPT_S:
                self.drop(nonce)
