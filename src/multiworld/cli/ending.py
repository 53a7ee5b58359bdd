"""Lets signals end a command as Ctrl-C does, with what it has started."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""What ``kill``, ``timeout`` and a closed terminal send."""


def end_as_ctrl_c() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does.

    By default they end it at once, and services that it has started live on. Both are
    ignored from the first one on, since ``timeout`` and shells send them twice; Ctrl-C
    still ends what does not come to an end. Signals that are ignored, as with
    ``nohup``, stay so.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, _ignore)
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # a shell starts what is behind `&` with it ignored
        handler = signal.default_int_handler
    handler(signal.SIGINT, frame)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, processes that are started do not inherit it."""
