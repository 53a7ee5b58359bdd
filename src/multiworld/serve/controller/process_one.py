"""``multiworld`` as the first process of a container, which must reap orphans."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def leave_process_one() -> None:
    """Continue in a child if this is process 1; call this before starting a thread."""
    # An orphan becomes a child of process 1, and remains a zombie unless process 1
    # waits for it. So process 1 only reaps processes and forwards signals.
    if os.getpid() != 1:
        return
    child = os.fork()
    if child == 0:
        return

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
