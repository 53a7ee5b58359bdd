"""The launcher for this machine: forks processes from a warm server. Shell."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from multiworld.errors import LaunchError
from multiworld.serve.launchers.base import (
    LauncherContext,
    OnExit,
    RunningProcess,
    began_at,
)
from multiworld.serve.launchers.helper_process import HelperProcess
from multiworld.serve.launchers.protocol import (
    FORK_NEWS,
    Exited,
    ForkNews,
    Launch,
    Launched,
    LaunchFailed,
)
from multiworld.serve.resources.amounts import Location, Need, Node
from multiworld.serve.resources.usage import outgrows
from multiworld.serve.transport.process_args import ProcessArgs

logger = logging.getLogger("multiworld.serve")

WARM_S = 120.0
"""How long the fork server may import."""


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
        preload: Sequence[str],
        env: dict[str, str],
        log: Path,
        on_exit: OnExit,
        node: Node,
    ) -> None:
        self._node = node
        self._preload, self._env = preload, env
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._server = HelperProcess(
            "multiworld.serve.launchers.fork_server",
            log,
            FORK_NEWS,
            self._on_news,
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
                await self._server.start(list(self._preload), env, WARM_S)

    def _on_news(self, news: ForkNews) -> None:
        match news:
            case Exited(name, code):
                self._unwatch(name)
                self._on_exit(name, code)
            case Launched(name, pid):
                future = self._starting.pop(name, None)
                if future is not None and not future.done():
                    future.set_result(pid)
            case LaunchFailed(name, error):
                future = self._starting.pop(name, None)
                if future is not None and not future.done():
                    future.set_exception(LaunchError(f"{name}: {error}"))

    def _server_ended(self) -> None:
        for name, future in self._starting.items():
            if not future.done():
                future.set_exception(LaunchError(f"{name}: the fork server has ended"))
        self._starting.clear()

    async def launch(
        self,
        name: str,
        args: ProcessArgs,
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
        text = args.model_dump_json()
        self._server.tell(Launch(name, text, str(log), self._env))
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


async def make(context: LauncherContext) -> LocalLauncher:
    """Return a launcher; its fork server starts with the first process.

    Cancellation: nothing is left.
    """
    log = context.logs / "launcher.log"
    return LocalLauncher(
        context.preload, context.env, log, context.on_exit, context.node
    )
