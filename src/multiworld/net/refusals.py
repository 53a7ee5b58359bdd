"""Counts and log lines of refused connections.

A port scanner must not fill the log, so at most one refusal of each kind is logged in
ten seconds, with the number of suppressed ones.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

EVERY_S = 10.0
"""Minimum number of seconds between two log lines of one kind."""


class Refusals:
    """Refused connections of one listener.

    Attributes:
        counts: Number of refused connections by kind: "version", "secret", "tls",
            "malformed", "slow", "crowded", "refused".
    """

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger, self._what = logger, what
        self._logged: dict[str, tuple[float, int]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, kind: str, where: object, why: object) -> None:
        """Count a refusal; log it unless its kind was logged recently. ``where`` is the
        remote address, empty for this host."""
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
