"""Launchers: where processes are started. Shell.

A launcher is small, so that a cluster's engine fits behind it: start a process by its
arguments, end it, and tell when one has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from multiworld.errors import LaunchError
from multiworld.serve.resources.amounts import Node, Spot
from multiworld.serve.resources.usage import outgrows

logger = logging.getLogger("multiworld.serve")

WARM_S = 120.0
"""How long the fork server may import."""

END_S = 5.0


@dataclass(frozen=True, slots=True)
class Running:
    """A process.

    Attributes:
        began: When it began, in the kernel's ticks; tells a reused ``pid`` apart.
    """

    name: str
    pid: int
    began: int
    node: str = ""


ExitTeller = Callable[[str, int | None], None]
"""Called with the name of a process that has ended, and its exit code if known."""


class Launcher(Protocol):
    """Starts and ends processes."""

    def nodes(self) -> tuple[Node, ...]:
        """Return the machines that there are."""

    def trouble(self) -> str:
        """Say why nothing can be started now; empty if it can."""

    async def launch(
        self, name: str, args: dict[str, Any], log: Path, spot: Spot | None
    ) -> Running:
        """Start one; its output goes to ``log``.

        Args:
            spot: Where; None for what belongs beside the controller.

        Raises:
            LaunchError: It could not be started.
        """

    def kill(self, running: Running, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; nothing happens if it has ended."""

    def outgrown(self, running: Running, limit: int) -> int | None:
        """Return the memory that a process uses, if it is more than ``limit`` bytes.

        None where that cannot be seen from here; every replica looks at itself, too.
        """

    def adopt(self, running: Running) -> bool:
        """Watch a process of an earlier controller; False if it has ended."""

    async def close(self) -> None:
        """End the launcher; the processes go on."""


def began_at(pid: int) -> int | None:
    """Return when a process began, in ticks since the machine started; None if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


class LocalLauncher:
    """Processes of this machine, forked from a warm server.

    Args:
        preload: Modules that the fork server imports.
        env: What the processes find in their environment.
        log: Where the output of the fork server itself goes.
        on_exit: Told of every process that ends.
        node: This machine, as far as it may be used.
    """

    def __init__(
        self,
        preload: list[str],
        env: dict[str, str],
        log: Path,
        on_exit: ExitTeller,
        node: Node,
    ) -> None:
        self._node = node
        self._preload, self._env, self._log = preload, env, log
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._watched: dict[str, int] = {}
        self._warming = asyncio.Lock()

    def nodes(self) -> tuple[Node, ...]:
        """Return this machine."""
        return (self._node,)

    def trouble(self) -> str:
        """Say why nothing can be started now; empty if it can."""
        return ""

    async def warm(self) -> None:
        """Start the fork server and wait until it has imported everything.

        Raises:
            LaunchError: It ended, or takes too long.

        Cancellation: safe.
        """
        async with self._warming:
            if self._reading is not None and not self._reading.done():
                return
            ours, theirs = socket.socketpair()
            with open(self._log, "ab") as log:  # noqa: ASYNC230 - opened, not read
                self._server = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "multiworld.serve.control.zygote",
                    str(theirs.fileno()),
                    *self._preload,
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **self._env},
                )
            theirs.close()
            reader, self._writer = await asyncio.open_connection(sock=ours)
            try:
                async with asyncio.timeout(WARM_S):
                    line = await reader.readline()
            except TimeoutError:
                line = b""
            if not line:
                self._server.kill()
                raise LaunchError(f"the fork server did not start; see {self._log}")
            self._reading = self._loop.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            news = json.loads(line)
            if news["kind"] == "exited":
                self._ended(news["name"], news["code"])
                continue
            future = self._starting.pop(news["name"], None)
            if future is None or future.done():
                continue
            if news["kind"] == "launched":
                future.set_result(news["pid"])
            else:
                future.set_exception(LaunchError(f"{news['name']}: {news['error']}"))
        for name, future in self._starting.items():
            if not future.done():
                future.set_exception(LaunchError(f"{name}: the fork server has ended"))
        self._starting.clear()

    async def launch(
        self, name: str, args: dict[str, Any], log: Path, spot: Spot | None = None
    ) -> Running:
        """Start a process.

        Raises:
            LaunchError: It could not be started.

        Cancellation: the process may start all the same.
        """
        await self.warm()
        assert self._writer is not None
        future: asyncio.Future[int] = self._loop.create_future()
        self._starting[name] = future
        order = {"name": name, "args": args, "log": str(log), "env": self._env}
        self._writer.write(json.dumps(order).encode() + b"\n")
        pid = await future
        running = Running(name, pid, began_at(pid) or 0, self._node.name)
        if not self._watch(running):
            raise LaunchError(f"{name} ended at once; see {log}")
        return running

    def outgrown(self, running: Running, limit: int) -> int | None:
        """Return the memory that a process uses, if it is more than ``limit``."""
        return outgrows(running.pid, limit)

    def adopt(self, running: Running) -> bool:
        """Watch a process of an earlier controller; False if it has ended."""
        return began_at(running.pid) == running.began and self._watch(running)

    def _watch(self, running: Running) -> bool:
        try:
            pidfd = os.pidfd_open(running.pid)
        except OSError:
            return False
        self._watched[running.name] = pidfd
        self._loop.add_reader(pidfd, self._gone, running.name)
        return True

    def _gone(self, name: str) -> None:
        # The fork server may know the code, and tells it in a moment.
        self._unwatch(name)
        self._loop.call_later(0.05, self._on_exit, name, None)

    def _ended(self, name: str, code: int) -> None:
        self._unwatch(name)
        self._on_exit(name, code)

    def _unwatch(self, name: str) -> None:
        pidfd = self._watched.pop(name, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def kill(self, running: Running, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; nothing happens if it has ended."""
        if began_at(running.pid) == running.began:
            try:
                os.kill(running.pid, number)
            except ProcessLookupError:
                pass

    async def close(self) -> None:
        """End the fork server; the processes go on."""
        for name in list(self._watched):
            self._unwatch(name)
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._server is not None and self._server.returncode is None:
            try:
                async with asyncio.timeout(END_S):
                    await self._server.wait()
            except TimeoutError:
                self._server.kill()
                await self._server.wait()
