"""What has happened to a service, for people: the last of it, numbered."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger("multiworld.serve")

EVENTS = 1000
BAD = ("lost", "probe failed", "rolled back", "unplaced", "outgrown", "launcher")


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to the service.

    Attributes:
        at: Seconds since the epoch.
    """

    number: int
    at: float
    kind: str
    text: str
    name: str


class History:
    """The last things that happened, and how many of each kind."""

    def __init__(self) -> None:
        self._entries: deque[HistoryEntry] = deque(maxlen=EVENTS)
        self.kinds: Counter[str] = Counter()

    def say(self, kind: str, text: str, name: str = "") -> None:
        """Note something, and log it."""
        number = self._entries[-1].number + 1 if self._entries else 1
        self._entries.append(HistoryEntry(number, time.time(), kind, text, name))
        self.kinds[kind] += 1
        level = logging.WARNING if kind in BAD else logging.INFO
        logger.log(level, "%s: %s", kind, text)

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return what happened after the event of that number."""
        return [asdict(event) for event in self._entries if event.number > number]
