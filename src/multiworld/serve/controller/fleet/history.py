"""Numbered history of a service's last events, for people."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from multiworld.serve.controller.fleet.entries import HistoryEntry

logger = logging.getLogger("multiworld.serve")

EVENTS = 1000  # number of events to keep

# Kinds of events that ``status`` shows.
OPERATIONS = (
    "update",
    "updated",
    "rolled back",
    "scale",
    "scaled",
    "drain requested",
    "chaos",
    "move",
    "lost",
    "outgrown",
    "node lost",
    "quarantined",
    "adopted",
    "slow",
    "trouble",
)

# Kinds of events logged as warnings.
BAD = (
    "lost",
    "probe failed",
    "rolled back",
    "unplaced",
    "outgrown",
    "launcher",
    "slow",
    "trouble",
)


class History:
    """The last events, and counts of all events by kind, model and stage."""

    def __init__(self) -> None:
        self._entries: deque[HistoryEntry] = deque(maxlen=EVENTS)
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.handed_over = 0  # number of connections that another gateway has continued
        self.on_event: Callable[[HistoryEntry], object] = lambda entry: None

    def say(self, kind: str, text: str, name: str = "") -> None:
        number = self._entries[-1].number + 1 if self._entries else 1
        entry = HistoryEntry(number, time.time(), kind, text, name)
        self._entries.append(entry)
        self.counts[kind, *_stage_of(name)] += 1
        self.on_event(entry)
        level = logging.WARNING if kind in BAD else logging.INFO
        logger.log(level, "%s: %s", kind, text)

    @property
    def last_number(self) -> int:
        return self._entries[-1].number if self._entries else 0

    def operations(self, count: int) -> list[HistoryEntry]:
        found = [entry for entry in self._entries if entry.kind in OPERATIONS]
        return found[max(0, len(found) - count) :]

    def since(self, number: int) -> list[HistoryEntry]:
        return [entry for entry in self._entries if entry.number > number]


def _stage_of(process: str) -> tuple[str, str]:
    """Return model and stage in a replica's name; empty for other processes."""
    parts = process.rsplit("/", 2)
    return (parts[0], parts[1]) if len(parts) == 3 else ("", "")
