"""Logging of errors that may repeat many times a second, such as a full disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

AGAIN_S = 60.0  # seconds until the same cause is logged again
MAX_CAUSES = 1000  # maximum number of remembered causes; the oldest is forgotten first


class RareLog:
    """Logs each cause once in ``AGAIN_S``, and how often it was suppressed."""

    def __init__(
        self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._clock = logger, clock
        self._logged_at: dict[str, float] = {}
        self._hidden: dict[str, int] = {}

    def error(self, what: str, error: Exception) -> None:
        cause = f"{what}: {error}"
        now = self._clock()
        if now - self._logged_at.get(cause, -AGAIN_S) < AGAIN_S:
            self._hidden[cause] = self._hidden.get(cause, 0) + 1
            return
        self._logged_at.pop(cause, None)  # keeps the dict in order of time
        self._logged_at[cause] = now
        if len(self._logged_at) > MAX_CAUSES:
            oldest = next(iter(self._logged_at))
            del self._logged_at[oldest]
            self._hidden.pop(oldest, None)
        hidden = self._hidden.pop(cause, 0)
        more = f" ({hidden} more times since)" if hidden else ""
        self._logger.error("%s%s", cause, more)
