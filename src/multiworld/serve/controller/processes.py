"""The processes of a service: their launch, adoption, signals and exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from multiworld.log_format import formatter_of
from multiworld.serve.controller.fleet.record import ProcessRecord
from multiworld.serve.controller.fleet.state import Process, ProcessPhase
from multiworld.serve.controller.launchers.base import (
    Launcher,
    RunningProcess,
    began_at,
)
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.controller.status import exit_words, last_words
from multiworld.serve.machines.amounts import Location, Need
from multiworld.serve.machines.bookings import Bookings
from multiworld.serve.machines.usage import is_stopped
from multiworld.serve.wire.process_args import ProcessArgs

logger = logging.getLogger("multiworld.serve")

KEPT_LOGS = 200  # number of latest logs of exited processes to keep
LOG_NAME = re.compile(r"(?:gateway|.+-\d+)-\d+\.log")  # log of a gateway or a replica


class Processes:
    """The running processes, as the launcher knows them."""

    def __init__(self, launcher: Launcher, bookings: Bookings, logs: Path) -> None:
        self._launcher, self._bookings, self._logs = launcher, bookings, logs
        self.running: dict[str, RunningProcess] = {}
        self._starting: set[str] = set()
        self._log_ends: dict[str, int] = {}  # bytes of each log at its last launch
        self._changed = asyncio.Event()

    def log_of(self, name: str) -> Path:
        return self._logs / f"{name.replace('/', '-')}.log"

    def last_words(self, name: str) -> str:
        return last_words(self.log_of(name), self._log_ends.get(name, 0))

    async def launch(
        self, args: ProcessArgs, location: Location | None, need: Need
    ) -> RunningProcess:
        """Start a process at a location; None: on the controller's machine."""
        name = args.name
        self._starting.add(name)
        try:
            self._remove_old_logs()
            self._note_log(name)
            # If cancelled, the process may still start; a later controller stops it.
            return await self._launcher.launch(
                name, args, self.log_of(name), location, need
            )
        except Exception:
            self._bookings.release(name)
            raise
        finally:
            self._starting.discard(name)

    def note_end(self, name: str, how: str) -> None:
        """Write to a process's log how the process ended, which it could not log."""
        where = logging.LogRecord(
            logger.name, logging.INFO, "", 0, "this process has ended: %s", (how,), None
        )
        line = formatter_of(os.environ, name).format(where)
        # The disk may be full, or the log may be on another machine.
        with contextlib.suppress(OSError):
            file = os.open(self.log_of(name), os.O_WRONLY | os.O_APPEND)
            try:
                os.write(file, f"{line}\n".encode())
            finally:
                os.close(file)

    def _note_log(self, name: str) -> None:
        """Record the end of a log, so that lines of an earlier process are ignored."""
        with contextlib.suppress(OSError):  # the log may not exist yet
            self._log_ends[name] = self.log_of(name).stat().st_size
            if len(self._log_ends) > KEPT_LOGS:
                del self._log_ends[next(iter(self._log_ends))]

    def _remove_old_logs(self) -> None:
        used = {self.log_of(name).name for name in (*self.running, *self._starting)}
        ended = [
            path
            for path in self._logs.glob("*.log")
            if LOG_NAME.fullmatch(path.name) and path.name not in used
        ]
        ended.sort(key=_changed_at)
        for path in ended[:-KEPT_LOGS]:
            with contextlib.suppress(OSError):
                # The next launch tries again to remove it.
                path.unlink()

    def adopt(
        self, records: Iterable[ProcessRecord], specs: Specs, now: float
    ) -> list[tuple[ProcessRecord, Process]]:
        """Adopt recorded processes that still run; kill those of unknown versions."""
        found = []
        for record in records:
            running = RunningProcess(record.name, record.pid, record.began, record.node)
            spec = specs.get(record.model, {}).get(record.version)
            if record.model and spec is None:
                self._launcher.kill(running)
                continue
            ranks = 1 if spec is None else spec.stages[record.stage].ranks
            if self._launcher.adopt(running, ranks):
                self.add(running)
                process = Process(
                    record.name,
                    record.model,
                    record.version,
                    record.stage,
                    ProcessPhase(record.phase),
                    now,
                    is_drain_requested=record.is_drain_requested,
                    options=record.options,
                    fingerprint=record.fingerprint,
                    weights=record.weights,
                    noise=record.noise,
                )
                found.append((record, process))
        return found

    def add(self, running: RunningProcess) -> None:
        self.running[running.name] = running

    def signal(self, name: str, number: int) -> None:
        if name in self.running:
            self._launcher.kill(self.running[name], number)

    def forget(self, name: str) -> None:
        """Remove a process, and kill it if it runs."""
        running = self.running.pop(name, None)
        if running is not None:
            self._launcher.kill(running)  # its booking is released when it exits
        elif name not in self._starting:
            self._bookings.release(name)

    def exited(self, name: str) -> None:
        """Remove a process that has exited."""
        self.running.pop(name, None)
        self._bookings.release(name)
        self._changed.set()

    async def end_all(self, names: Iterable[str], limit_s: float) -> None:
        """Send SIGTERM to processes, and SIGKILL to those left after ``limit_s``."""
        names = list(names)
        for name in names:
            self.signal(name, signal.SIGTERM)
            self.signal(name, signal.SIGCONT)
        try:
            async with asyncio.timeout(limit_s):
                while any(name in self.running for name in names):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for name in names:
                if name in self.running:
                    self._launcher.kill(self.running.pop(name))


def end_words(
    code: int | None,  # negative for a signal; None if it is unknown
    *,
    is_ours: bool,  # whether the controller has killed it
    # Whether the kernel killed a process for lack of memory since the previous call.
    ran_out_of_memory: Callable[[], bool],
) -> str:
    """Return in words how a process exited."""
    if code is None:
        return "it ended"
    words = f"it ended with {exit_words(code)}"
    if code != -signal.SIGKILL:
        return words
    if is_ours:
        return "the controller killed it"
    lack = (
        ", and the kernel has killed a process for lack of memory since the last check"
    )
    return words + lack * ran_out_of_memory()


def local_words(pid: int, began: int) -> str:
    """Return the state of a silent process, in words; empty if it is not here."""
    if began_at(pid) != began:
        return ""
    if is_stopped(pid):
        return "; its process is stopped"
    return "; its process runs on this machine: a network partition may separate it"


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
