"""Handling of signals that end a command and everything that it has started."""

from __future__ import annotations

import signal
from types import FrameType

# ``kill`` and ``timeout`` send the first, a closed terminal the second.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def end_as_ctrl_c() -> None:
    """Make SIGTERM and SIGHUP end this process as Ctrl-C does."""
    # By default these signals end the process at once, and services that it has started
    # keep running. Signals that are ignored, as with ``nohup``, stay ignored.
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # ``timeout`` and shells send these signals twice: ignore the second. Ctrl-C still
    # works if shutting down hangs.
    for each in SIGNALS:
        signal.signal(each, _ignore)
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # shells start background jobs with SIGINT ignored
        handler = signal.default_int_handler
    handler(signal.SIGINT, frame)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, child processes do not inherit this handler."""
