"""Launcher that starts processes on this machine through a fork server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.base import (
    LauncherContext,
    RunningProcess,
    began_at,
)
from multiworld.serve.controller.launchers.forks import Forks
from multiworld.serve.controller.launchers.protocol import Launch
from multiworld.serve.machines.amounts import Location, Need, Node
from multiworld.serve.machines.usage import memory_above
from multiworld.serve.wire.process_args import ProcessArgs


class LocalLauncher:
    def __init__(self, context: LauncherContext) -> None:
        self._context, self._on_exit = context, context.on_exit
        self._loop = asyncio.get_running_loop()
        self._forks = Forks(
            context.preload,
            context.env,
            context.logs / "launcher.log",
            self._exited,
            context.waiting,
        )
        self._watched: dict[str, int] = {}

    def nodes(self) -> tuple[Node, ...]:
        return (self._context.node,)

    def trouble(self) -> str:
        return self._forks.trouble

    async def warm(self) -> None:
        await self._forks.warm()

    def _exited(self, name: str, code: int | None) -> None:
        self._unwatch(name)
        self._on_exit(name, code)

    async def launch(
        self, name: str, args: ProcessArgs, log: Path, spot: Location | None, need: Need
    ) -> RunningProcess:
        text = args.model_dump_json()
        pid = await self._forks.fork(Launch(name, text, str(log), self._context.env))
        node = "" if spot is None else spot.node
        running = RunningProcess(name, pid, began_at(pid) or 0, node)
        try:
            is_running = self._watch(running)
        except OSError as error:  # too many open files: its exit would go unnoticed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it has just been forked
            raise LaunchError(f"{name} cannot be watched: {error}") from error
        if not is_running:
            raise LaunchError(f"{name} exited at once; see {log}")
        return running

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        return memory_above(running.pid, limit)

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        try:
            return began_at(running.pid) == running.began and self._watch(running)
        except OSError:  # too many open files
            return False

    def settle(self) -> None:
        """Do nothing: processes that were not adopted exit by themselves."""

    def _watch(self, running: RunningProcess) -> bool:
        try:
            pidfd = os.pidfd_open(running.pid)
        except ProcessLookupError:
            return False
        self._watched[running.name] = pidfd
        self._loop.add_reader(pidfd, self._gone, running.name)
        return True

    def _gone(self, name: str) -> None:
        # Wait a moment: the fork server may still report the exit code.
        self._unwatch(name)
        self._loop.call_later(0.05, self._on_exit, name, None)

    def _unwatch(self, name: str) -> None:
        pidfd = self._watched.pop(name, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
        if began_at(running.pid) == running.began:
            try:
                os.kill(running.pid, number)
            except ProcessLookupError:
                pass

    async def close(self) -> None:
        for name in list(self._watched):
            self._unwatch(name)
        await self._forks.close()


async def make(context: LauncherContext) -> LocalLauncher:
    """Return a launcher; its fork server starts with the first process."""
    return LocalLauncher(context)
