"""A leash: the kernel kills a process as soon as nobody holds its leash.

The leash is a pipe. The process that wears it has the read end, and its holders have
the write end. When the last holder exits, for whatever reason, the kernel sends the
wearer the signal of its read end, SIGKILL (``F_SETSIG`` in fcntl(2)), which kills even
a process that is stopped or hangs. This ties a process to one that is not its parent.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal


class Leash:
    """A new leash, which this process holds until ``let_go``.

    Attributes:
        worn_at: Path at which a process of the same user can open it, to wear it.
        held_at: Path at which a process of the same user can hold it, too.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = os.pipe()
        folder = f"/proc/{os.getpid()}/fd"
        self.worn_at, self.held_at = (f"{folder}/{end}" for end in self._ends)

    def let_go(self) -> None:
        """Stop holding it; its wearer is killed, unless another process holds it."""
        for end in self._ends:
            os.close(end)
        self._ends = ()


def hold_leash(path: str) -> int:
    """Hold another process's leash (``held_at``); closing the result lets go."""
    return os.open(path, os.O_WRONLY)


def open_leash(path: str) -> int:
    """Open a leash at its ``worn_at``; return a descriptor for ``wear_leash``."""
    return os.open(path, os.O_RDONLY)


def wear_leash(reader: int) -> None:
    """Make the kernel kill this process once nobody holds the leash."""
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(reader, fcntl.F_GETFL)
    fcntl.fcntl(reader, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(reader, 0)  # a hang-up is always reported
    if poll.poll(0):  # nobody holds it any more
        os.kill(os.getpid(), signal.SIGKILL)
