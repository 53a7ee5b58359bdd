"""Launcher that starts processes on this machine through a fork server. Shell."""

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
"""Most seconds that the fork server may take to import its modules."""


class LocalLauncher:
    """Processes of this machine, forked from a fork server; see ``base.Launcher``.

    Args:
        preload: Modules that the fork server imports.
        env: Variables added to the environment of every process.
        log: File for the output of the fork server itself.
        on_exit: Called for every process that exits.
        node: This machine, with the resources that may be used.
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
            self._server_hangs,
        )
        self._trouble = ""
        self._replacing: asyncio.Task[None] | None = None
        self._starting: dict[str, asyncio.Future[int]] = {}
        self._watched: dict[str, int] = {}
        self._warming = asyncio.Lock()

    def nodes(self) -> tuple[Node, ...]:
        """Return this machine."""
        return (self._node,)

    def trouble(self) -> str:
        """Return why no process can be started now; empty if one can."""
        return self._trouble

    async def warm(self) -> None:
        """Start the fork server, if it does not run, and wait until it is ready.

        Raises:
            LaunchError: The fork server exited, or was not ready within ``WARM_S``.

        Cancellation: Safe; see ``HelperProcess.start``.
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

    def _server_hangs(self) -> None:
        self._trouble = (
            "the fork server hangs and is replaced: nothing starts meanwhile"
        )

    def _server_ended(self) -> None:
        for name, future in self._starting.items():
            if not future.done():
                future.set_exception(LaunchError(f"{name}: the fork server has exited"))
        self._starting.clear()
        self._replacing = self._loop.create_task(self._replace())

    async def _replace(self) -> None:
        """Start another fork server at once, not only when a process is needed."""
        try:
            await self.warm()
        except LaunchError as error:  # the next launch tries again
            logger.error("%s", error)
        self._trouble = ""

    async def launch(
        self,
        name: str,
        args: ProcessArgs,
        log: Path,
        spot: Location | None,
        need: Need,
    ) -> RunningProcess:
        """Start a process on this machine.

        Args:
            name: Its name in the service.
            args: Its arguments.
            log: File for its output.
            spot: This machine and the GPU to use; None runs it beside the controller.
            need: Not used.

        Raises:
            LaunchError: The process could not be started, or exited at once.

        Cancellation: The process may start all the same.
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
            raise LaunchError(f"{name} exited at once; see {log}")
        return running

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        """Return the bytes of memory that a process uses, if more than ``limit``."""
        return outgrows(running.pid, limit)

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        """Watch a process of an earlier controller; return False if it has exited."""
        return began_at(running.pid) == running.began and self._watch(running)

    def settle(self) -> None:
        """Do nothing: processes that were not adopted exit by themselves."""

    def _watch(self, running: RunningProcess) -> bool:
        try:
            pidfd = os.pidfd_open(running.pid)
        except OSError:
            return False
        self._watched[running.name] = pidfd
        self._loop.add_reader(pidfd, self._gone, running.name)
        return True

    def _gone(self, name: str) -> None:
        # Wait a moment: the fork server may report the exit code.
        self._unwatch(name)
        self._loop.call_later(0.05, self._on_exit, name, None)

    def _unwatch(self, name: str) -> None:
        pidfd = self._watched.pop(name, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; do nothing if it has exited."""
        if began_at(running.pid) == running.began:
            try:
                os.kill(running.pid, number)
            except ProcessLookupError:
                pass

    async def close(self) -> None:
        """Shut the fork server down; the processes go on.

        Cancellation: The fork server exits once it sees that its socket is closed.
        """
        for name in list(self._watched):
            self._unwatch(name)
        if self._replacing is not None:
            self._replacing.cancel()
        await self._server.close()


async def make(context: LauncherContext) -> LocalLauncher:
    """Return a launcher; its fork server starts with the first process.

    Cancellation: Safe.
    """
    log = context.logs / "launcher.log"
    return LocalLauncher(
        context.preload, context.env, log, context.on_exit, context.node
    )
