"""Thread that checks whether the main thread hangs."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

from multiworld.liveness.pause_detector import PauseDetector
from multiworld.serve.deadlines import GUARD_S

EXIT_HUNG = 70  # exit code of a replica whose model hangs


def exit_hung() -> None:
    """Write the stack traces of all threads, and exit at once."""
    faulthandler.dump_traceback(sys.stderr)
    os._exit(EXIT_HUNG)


class HangGuard:
    """Calls a function periodically in a separate thread, once it is started."""

    def __init__(
        self, look: Callable[[float], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        # ``look`` exits the process if something hangs. Its argument is the monotonic
        # time at which the process last resumed after a pause: the time before that
        # does not count.
        self._look, self._clock = look, clock
        self._pauses = PauseDetector(GUARD_S)
        self._is_started = self._is_stopped = False
        self._turned_at = clock()

    def stop(self) -> None:
        """Stop the thread after at most one more check."""
        self._is_stopped = True

    def turned(self) -> None:
        """Record that the watched loop has made progress."""
        self._turned_at = self._clock()

    def still_s(self, resumed_at: float) -> float:
        """Return the seconds since ``turned``, or since the process resumed."""
        return self._clock() - max(self._turned_at, resumed_at)

    def start(self) -> None:
        """Start the thread unless it already runs; it ends with the process."""
        if not self._is_started:
            self._is_started = True
            threading.Thread(
                target=self._run, name="multiworld guard", daemon=True
            ).start()

    def _run(self) -> None:
        while not self._is_stopped:
            time.sleep(GUARD_S)
            self._pauses.look(self._clock())
            self._look(self._pauses.resumed_at)
