"""Entries of a service's history and of its decision log. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class HistoryEntry(msgspec.Struct, frozen=True):
    """An event of a service; ``at`` is in seconds since the Unix epoch."""

    number: int
    at: float
    kind: str
    text: str
    name: str


class Decision(msgspec.Struct, frozen=True):
    """A decision with an effect; `snapshot`, its complete input, may be omitted."""

    number: int
    at: float  # seconds since the Unix epoch
    kind: str  # "scaling" or "placement"
    about: str  # name of the model; empty for all models
    what: str
    # The keys of ``facts`` and ``snapshot`` depend on the policy, which users may
    # replace.
    facts: dict[str, Any]
    snapshot: dict[str, Any] | UnsetType = UNSET


class Assessment(msgspec.Struct, frozen=True):
    """The latest reason for the current scale or placement; see ``Decision``."""

    kind: str
    about: str
    at: float
    what: str
