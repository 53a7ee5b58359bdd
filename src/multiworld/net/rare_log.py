"""Logging of errors that may repeat many times a second, such as a full disk."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

AGAIN_S = 60.0  # seconds until the same cause is logged again
MAX_CAUSES = 1000  # maximum number of remembered causes; the oldest is forgotten first


class RareLog:
    """Logs each cause once per ``AGAIN_S``, with the number of suppressed repeats."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._clock = logger, clock
        # The time at which each cause was logged last, and how often it was suppressed
        # since.
        self._causes: dict[str, tuple[float, int]] = {}

    def error(self, what: str, error: Exception | str, cause: str = "") -> None:
        """Log an error; errors with one ``cause`` (default: the text) are repeats."""
        text = f"{what}: {error}"
        cause = cause or text
        now = self._clock()
        logged_at, hidden = self._causes.get(cause, (-math.inf, 0))
        if now - logged_at < AGAIN_S:
            self._causes[cause] = logged_at, hidden + 1
            return
        # Removed first, so that the dict stays ordered by time.
        self._causes.pop(cause, None)
        self._causes[cause] = now, 0
        if len(self._causes) > MAX_CAUSES:
            del self._causes[next(iter(self._causes))]
        more = f" ({hidden} more times since)" if hidden else ""
        self._logger.error("%s%s", text, more)
