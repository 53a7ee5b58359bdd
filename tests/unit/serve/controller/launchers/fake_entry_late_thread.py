"""A module of a model that starts a thread some time after it was imported."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def _start(number: int, frame: FrameType | None) -> None:
    threading.Thread(target=threading.Event().wait, daemon=True).start()


signal.signal(signal.SIGALRM, _start)
signal.setitimer(signal.ITIMER_REAL, 0.5)
