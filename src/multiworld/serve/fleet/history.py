"""History of a service: its last events, numbered, for people. Shell."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque

from multiworld.serve.fleet.entries import HistoryEntry

logger = logging.getLogger("multiworld.serve")

EVENTS = 1000
"""Most events that are kept."""

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
"""Kinds of events that are logged as warnings."""


class History:
    """The last events of a service, and counts of all events.

    Attributes:
        kinds: Number of events so far, by kind.
    """

    def __init__(self) -> None:
        self._entries: deque[HistoryEntry] = deque(maxlen=EVENTS)
        self.kinds: Counter[str] = Counter()

    def say(self, kind: str, text: str, name: str = "") -> None:
        """Record and log an event.

        Args:
            kind: Kind of the event.
            text: Description for people.
            name: Name of the process concerned; empty if there is none.
        """
        number = self._entries[-1].number + 1 if self._entries else 1
        self._entries.append(HistoryEntry(number, time.time(), kind, text, name))
        self.kinds[kind] += 1
        level = logging.WARNING if kind in BAD else logging.INFO
        logger.log(level, "%s: %s", kind, text)

    @property
    def last_number(self) -> int:
        """Number of the last event; 0 before the first."""
        return self._entries[-1].number if self._entries else 0

    def operations(self, count: int) -> list[HistoryEntry]:
        """Return the last events that changed what runs, and who asked for it."""
        found = [entry for entry in self._entries if entry.kind in OPERATIONS]
        return found[max(0, len(found) - count) :]

    def since(self, number: int) -> list[HistoryEntry]:
        """Return the events after the event with this number."""
        return [entry for entry in self._entries if entry.number > number]
