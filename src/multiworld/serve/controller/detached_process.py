"""Start of a process that may outlive this one: the store and the stream keeper."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from multiworld.serve.controller.launchers.forked_child import ForkedChild


class DetachedProcess(ForkedChild):
    """A process in a session of its own, whose first line says that it is ready.

    Not one of ``asyncio.subprocess``: asyncio kills a child whose transport is garbage,
    and at the end of an event loop each is (CPython gh-114177, 3.13.4 and 3.14).
    """

    def __init__(self, pid: int, output: IO[bytes]) -> None:
        super().__init__(pid)
        self._output = output

    async def first_line(self) -> bytes:
        """Return the first line of its output; empty if it ends without one."""
        lines = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), self._output
        )
        try:
            return await lines.readline()
        finally:
            transport.close()


def start_detached(
    command: Sequence[str],
    log: Path,
    env: dict[str, str],
    descriptors: Sequence[int] = (),  # which it inherits
) -> DetachedProcess:
    """Start ``command``; its errors go to the end of ``log``."""
    with open(log, "ab") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=descriptors,
            env={**os.environ, **env},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        child = DetachedProcess(process.pid, process.stdout)
    except OSError:  # too many open files
        process.kill()
        raise
    process.returncode = 0  # ``ForkedChild`` reaps it; else ``Popen`` would warn
    return child
