"""Launchers: where processes are started. Shell.

A launcher is small, so that a cluster's engine fits behind it: start a process by its
arguments, end it, and tell when one has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from multiworld.errors import LaunchError
from multiworld.serve.launchers.helper_process import HelperProcess
from multiworld.serve.resources.amounts import Location, Need, Node
from multiworld.serve.resources.usage import outgrows

logger = logging.getLogger("multiworld.serve")

WARM_S = 120.0
"""How long the fork server may import."""


@dataclass(frozen=True, slots=True)
class RunningProcess:
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
        self,
        name: str,
        args: dict[str, Any],
        log: Path,
        spot: Location | None,
        need: Need,
    ) -> RunningProcess:
        """Start one; its output goes to ``log``.

        Args:
            spot: Where; None for what belongs beside the controller.
            need: What it books there.

        Raises:
            LaunchError: It could not be started.
        """

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; nothing happens if it has ended."""

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        """Return the memory that a process uses, if it is more than ``limit`` bytes.

        None where that cannot be seen from here; every replica looks at itself, too.
        """

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        """Watch a process of an earlier controller; False if it has ended."""

    def settle(self) -> None:
        """End what an earlier controller left behind that was not adopted."""

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
        self._preload, self._env = preload, env
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._server = HelperProcess(
            "multiworld.serve.launchers.fork_server",
            log,
            self._told,
            self._server_ended,
        )
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
            if not self._server.is_running:
                env = {"OPENBLAS_NUM_THREADS": "1", **self._env}
                await self._server.start(self._preload, env, WARM_S)

    def _told(self, news: dict[str, Any]) -> None:
        if news["kind"] == "exited":
            self._ended(news["name"], news["code"])
            return
        future = self._starting.pop(news["name"], None)
        if future is None or future.done():
            return
        if news["kind"] == "launched":
            future.set_result(news["pid"])
        else:
            future.set_exception(LaunchError(f"{news['name']}: {news['error']}"))

    def _server_ended(self) -> None:
        for name, future in self._starting.items():
            if not future.done():
                future.set_exception(LaunchError(f"{name}: the fork server has ended"))
        self._starting.clear()

    async def launch(
        self,
        name: str,
        args: dict[str, Any],
        log: Path,
        spot: Location | None,
        need: Need,
    ) -> RunningProcess:
        """Start a process.

        Raises:
            LaunchError: It could not be started.

        Cancellation: the process may start all the same.
        """
        await self.warm()
        future: asyncio.Future[int] = self._loop.create_future()
        self._starting[name] = future
        order = {"name": name, "args": args, "log": str(log), "env": self._env}
        self._server.tell(order)
        pid = await future
        node = "" if spot is None else spot.node
        running = RunningProcess(name, pid, began_at(pid) or 0, node)
        if not self._watch(running):
            raise LaunchError(f"{name} ended at once; see {log}")
        return running

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        """Return the memory that a process uses, if it is more than ``limit``."""
        return outgrows(running.pid, limit)

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        """Watch a process of an earlier controller; False if it has ended."""
        return began_at(running.pid) == running.began and self._watch(running)

    def settle(self) -> None:
        """Do nothing: what is not adopted ends by itself."""

    def _watch(self, running: RunningProcess) -> bool:
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

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
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
        await self._server.close()
