"""Counting and logging those who were not let in. Shell.

A port scanner must not fill the log: of each kind, the first is logged and then one
line every ten seconds with how many there were.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

EVERY_S = 10.0


class Refusals:
    """The account of one listener. ``counts`` is by kind: "version", "secret", "tls",
    "malformed", "slow", "crowded", "refused"."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._logged: dict[str, tuple[float, int]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, where: object, why: object) -> None:
        """Count one, and log it if its kind was not logged just now."""
        self.counts[kind] += 1
        now = time.monotonic()
        at, count = self._logged.get(kind, (now - EVERY_S, 0))
        if now - at < EVERY_S:
            return
        self._logged[kind] = now, self.counts[kind]
        more = self.counts[kind] - count - 1
        also = f" (and {more} more like it)" if more else ""
        self._logger.warning(
            "%s refused a connection from %s: %s: %s%s",
            self._what,
            where or "this host",
            kind,
            why,
            also,
        )
