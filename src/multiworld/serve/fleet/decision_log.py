"""The decisions of a service, with what they were made from. Shell."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

logger = logging.getLogger("multiworld.serve")

KEPT = 200
"""Decisions that are kept in memory."""

SNAPSHOT = "snapshot"

FILE_BYTES = 8 * 2**20
"""A file that has grown so large is put aside, in place of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """One decision.

    Attributes:
        kind: "scaling" or "placement".
        about: The model; empty for all.
        what: Was decided, in a line.
        facts: Numbers behind it.
        snapshot: All that it was made from.
    """

    number: int
    at: float
    kind: str
    about: str
    what: str
    facts: dict[str, Any] = field(default_factory=dict)
    snapshot: dict[str, Any] = field(default_factory=dict)


class DecisionLog:
    """Decisions that changed something, and what was thought last about the others.

    Args:
        path: Where they are kept, a line each; None: nowhere.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._decided: deque[LoggedDecision] = deque(maxlen=KEPT)
        self._number = 0
        self._reasons: dict[tuple[str, str], tuple[float, str]] = {}

    def record(
        self,
        kind: str,
        about: str,
        what: str,
        facts: dict[str, Any],
        snapshot: dict[str, Any],
    ) -> None:
        """Note a decision that changes something."""
        self._number += 1
        decided = LoggedDecision(
            number=self._number,
            at=time.time(),
            kind=kind,
            about=about,
            what=what,
            facts=facts,
            snapshot=snapshot,
        )
        self._decided.append(decided)
        self.set_reason(kind, about, what)
        self._write(decided)

    def set_reason(self, kind: str, about: str, what: str) -> None:
        """Note what was thought last, whether it changes something or not."""
        self._reasons[kind, about] = time.time(), what

    def last(self, count: int, *, with_snapshots: bool) -> list[dict[str, Any]]:
        """Return the last decisions, oldest first."""
        chosen = list(self._decided)[max(0, len(self._decided) - count) :]
        names = [
            f.name
            for f in fields(LoggedDecision)
            if with_snapshots or f.name != SNAPSHOT
        ]
        return [{name: getattr(d, name) for name in names} for d in chosen]

    def reasons(self) -> list[dict[str, Any]]:
        """Return what was thought last, of each kind and about each model."""
        return [
            {"kind": kind, "about": about, "at": at, "what": what}
            for (kind, about), (at, what) in self._reasons.items()
        ]

    def _write(self, decided: LoggedDecision) -> None:
        if self._path is None:
            return
        try:
            if self._path.exists() and self._path.stat().st_size > FILE_BYTES:
                self._path.replace(self._path.with_suffix(".old.jsonl"))
            with open(self._path, "a") as file:
                names = [f.name for f in fields(LoggedDecision)]
                entry = {name: getattr(decided, name) for name in names}
                file.write(json.dumps(entry, default=str, skipkeys=True) + "\n")
        except (OSError, ValueError) as error:  # the service does not depend on it
            logger.error("a decision cannot be recorded: %s", error)
