"""Thread that looks for a hang of the event loop's own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from multiworld.liveness.pause_detector import PauseDetector

EXIT_HUNG = 70
"""Exit code of a replica that exits because its model hangs."""

GUARD_S = 1.0
"""Seconds between two looks."""


class HangGuard:
    """Calls a function again and again in a thread of its own, once it is started.

    Args:
        look: Ends the process if something hangs. It must be safe in any thread. It
            gets the monotonic time before which nothing counts: the process was paused.
        clock: Returns the monotonic time in seconds.
    """

    def __init__(
        self, look: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look, self._clock = look, clock
        self._pauses = PauseDetector(GUARD_S)
        self._is_started = False

    def start(self) -> None:
        """Start the thread, if it does not run yet; it ends with the process."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(
                target=self._run, name="multiworld guard", daemon=True
            ).start()

    def _run(self) -> None:
        while True:
            time.sleep(GUARD_S)
            self._pauses.look(self._clock())
            self._look(self._pauses.resumed_at)
