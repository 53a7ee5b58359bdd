"""A child process that no object of asyncio or ``subprocess`` owns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

UNKNOWN = 255  # exit code of a child whose own is not known


class ForkedChild:
    """A child of ``os.fork``; it is reaped on exit, like asyncio's subprocesses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        try:
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # this process was started with SIGCHLD ignored
            status = UNKNOWN << 8
        self.returncode = os.waitstatus_to_exitcode(status)
        self._exited.set()

    def kill(self) -> None:
        """Kill the child; do nothing if it has exited."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def wait(self) -> None:
        await self._exited.wait()
