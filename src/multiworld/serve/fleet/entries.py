"""Entries of a service's history and of its decision log. Pure."""

from __future__ import annotations

import msgspec


class HistoryEntry(msgspec.Struct, frozen=True):
    """An event in the life of a service.

    Attributes:
        number: Number of the event, from 1.
        at: Time in seconds since the epoch.
        kind: Kind of the event.
        text: Description for people.
        name: Name of the process concerned; empty if there is none.
    """

    number: int
    at: float
    kind: str
    text: str
    name: str


class Assessment(msgspec.Struct, frozen=True):
    """The latest reason for what runs, whether it changed something or not.

    Attributes:
        kind: "scaling" or "placement".
        about: Name of the model; empty for all models.
        at: Time in seconds since the epoch.
        what: The reason, in one line.
    """

    kind: str
    about: str
    at: float
    what: str
