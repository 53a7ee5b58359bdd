"""A leash: the kernel kills a process as soon as no process holds its leash.

The leash is a pipe: its wearer has the read end, its holders have the write end. When
the last holder exits, for whatever reason, the kernel sends SIGKILL to the wearer
(``F_SETSIG`` in fcntl(2)), even if the wearer is stopped or hangs. So a process can be
made to die with another one that is not its parent. ``python leash.py FD COMMAND …``
puts its process group on the leash whose read end is FD, and then executes the command.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys


class Leash:
    """A new leash, which this process holds until ``let_go``."""

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = os.pipe()
        folder = f"/proc/{os.getpid()}/fd"
        # Paths that another process of this user can open to wear or hold the leash.
        self.worn_at, self.held_at = (f"{folder}/{end}" for end in self._ends)

    def let_go(self) -> None:
        """Release the leash; its wearer is killed unless another process holds it."""
        for end in self._ends:
            os.close(end)
        self._ends = ()


def hold_leash(path: str) -> int:
    """Hold the leash with this path until the returned descriptor is closed."""
    return os.open(path, os.O_WRONLY)


def open_leash(path: str) -> int:
    """Open the leash at ``Leash.worn_at``; return a descriptor for ``wear_leash``."""
    return os.open(path, os.O_RDONLY)


def wear_leash(reader: int, wearer: int | None = None) -> None:
    """Make the kernel kill ``wearer`` once no process holds the leash.

    ``wearer`` is a process ID or a negated process group ID; default: this process.
    """
    wearer = os.getpid() if wearer is None else wearer
    fcntl.fcntl(reader, fcntl.F_SETOWN, wearer)
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(reader, fcntl.F_GETFL)
    fcntl.fcntl(reader, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(reader, 0)  # no flags, because ``poll`` always reports a hang-up
    if poll.poll(0):  # no process holds the leash any more
        os.kill(wearer, signal.SIGKILL)


if __name__ == "__main__":
    wear_leash(int(sys.argv[1]), -os.getpgrp())
    os.execvp(sys.argv[2], sys.argv[2:])
