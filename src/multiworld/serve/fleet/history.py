"""What has happened to a service, for people: the last of it, numbered."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger("multiworld.serve")

EVENTS = 1000
OPERATIONS = (
    "update",
    "updated",
    "rolled back",
    "scale",
    "scaled",
    "drain requested",
    "chaos",
    "move",
)
"""Kinds of events by which people or policies changed what runs."""

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
        self._happened: deque[HistoryEntry] = deque(maxlen=EVENTS)
        self.kinds: Counter[str] = Counter()

    def say(self, kind: str, text: str, name: str = "") -> None:
        """Note something, and log it."""
        number = self._happened[-1].number + 1 if self._happened else 1
        self._happened.append(HistoryEntry(number, time.time(), kind, text, name))
        self.kinds[kind] += 1
        level = logging.WARNING if kind in BAD else logging.INFO
        logger.log(level, "%s: %s", kind, text)

    @property
    def last_number(self) -> int:
        """Number of the last event; 0 before the first."""
        return self._happened[-1].number if self._happened else 0

    def operations(self, count: int) -> list[dict[str, Any]]:
        """Return the last events that changed what runs, and who asked for it."""
        found = [asdict(e) for e in self._happened if e.kind in OPERATIONS]
        return found[max(0, len(found) - count) :]

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return what happened after the event of that number."""
        return [asdict(event) for event in self._happened if event.number > number]
