"""Entries of a service's history and of its decision log. Pure."""

from __future__ import annotations

import msgspec


class HistoryEntry(msgspec.Struct, frozen=True):
    """An event of a service; ``at`` is in seconds since the Unix epoch."""

    number: int
    at: float
    kind: str
    text: str
    name: str


class Assessment(msgspec.Struct, frozen=True):
    """The latest reason for the current scale or placement; see ``LoggedDecision``."""

    kind: str
    about: str
    at: float
    what: str
