"""Lifecycle of processes, from launch to the reason for their exit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from multiworld.errors import (
    LaunchError,
    MemberLostError,
    PlacementError,
    StaleEpochError,
)
from multiworld.serve.controller.fleet import events
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.state import Process, ProcessPhase
from multiworld.serve.controller.launchers.base import Launcher
from multiworld.serve.controller.placement.replica_placement import ReplicaBookings
from multiworld.serve.controller.process_links import ProcessLinks
from multiworld.serve.controller.processes import Processes, end_words, local_words
from multiworld.serve.controller.reconciliation import Reconciliation
from multiworld.serve.controller.versions import Versions
from multiworld.serve.deadlines import EXIT_S
from multiworld.serve.keeper import kill_notes
from multiworld.serve.machines.amounts import Location, Need, needs_of
from multiworld.serve.machines.usage import MemoryKills
from multiworld.serve.wire.process_args import ProcessArgs

logger = logging.getLogger("multiworld.serve")

# Phases before a replica has loaded its stage.
STARTING = (ProcessPhase.LAUNCHING, ProcessPhase.JOINED)
IS_UP = (ProcessPhase.LOADED, ProcessPhase.SPARE, ProcessPhase.READY)


class ProcessLifecycle:
    """Launches and kills processes, and reports each exit with its cause.

    Up to three sources report an exit: the launcher (``exited``, with the exit code),
    the control world (``lost``), and a watched pidfd, if the launcher did not start the
    process. The first to report counts; the reconciler ignores the exit of a process
    that it no longer has.
    """

    def __init__(
        self,
        fleet: Reconciler,
        reconciliation: Reconciliation,
        versions: Versions,
        processes: Processes,
        links: ProcessLinks,
        launcher: Launcher,
        bookings: ReplicaBookings,
        history: History,
        # Arguments of a process, by its name and model.
        args_of: Callable[[str, str], ProcessArgs],
        # Waits until the record is on disk.
        recorded: Callable[[], Coroutine[Any, Any, None]],
        save: Callable[[], None],
        keeper: Path,  # the folder of the stream keeper
    ) -> None:
        self._fleet, self._reconciliation = fleet, reconciliation
        self._versions, self._processes, self._links = versions, processes, links
        self._launcher, self._bookings, self._history = launcher, bookings, history
        self._args_of, self._recorded, self._save = args_of, recorded, save
        self._keeper = keeper
        self._launching: set[asyncio.Task[None]] = set()
        # Processes that this controller killed and whose exit is not reported yet.
        self._killed: set[str] = set()
        self._memory_kills = MemoryKills()
        self._loop = asyncio.get_running_loop()

    @property
    def launching(self) -> Sequence[asyncio.Task[None]]:
        return tuple(self._launching)

    def launch(self, name: str, model: str, version: str, stage: int) -> None:
        task = self._loop.create_task(self._launch(name, model, version, stage))
        self._launching.add(task)
        task.add_done_callback(self._launching.discard)

    def kill(self, name: str) -> None:
        self._killed.add(name)
        self._processes.forget(name)
        self._links.close(name)

    async def _launch(self, name: str, model: str, version: str, stage: int) -> None:
        await self._recorded()  # otherwise the next controller might reuse the name
        spot, need = None, Need()
        if name not in self._fleet.processes:
            return  # no longer desired
        args = self._args_of(name, model)
        if model:
            spec = self._versions.get(model, version)
            need = needs_of(spec)[stage]
            if trouble := self._launcher.trouble():
                self._reconciliation.happened(events.Unplaced(name, trouble, True))
                return
            try:
                spot = self._book(name, (model, version, stage), need)
            except PlacementError as error:
                self._reconciliation.happened(events.Unplaced(name, str(error)))
                return
            update = {"model": model, "stage": stage, "spec": spec, "gpus": spot.gpus}
            args = args.model_copy(update=update)
        self._links.open(name)
        try:
            running = await self._processes.launch(args, spot, need)
        except LaunchError as error:
            self._launch_failed(name, error)
            return
        except Exception as error:  # a user's launcher may raise anything
            logger.exception("the launcher failed to start %s", name)
            text = f"the launcher raised {type(error).__name__}: {error}"
            self._launch_failed(name, LaunchError(text))
            return
        if name in self._fleet.processes:
            self._processes.add(running)
            self._save()
        else:
            self._launcher.kill(running)  # its exit releases its booking

    def _book(self, name: str, post: tuple[str, str, int], need: Need) -> Location:
        spot, why = self._bookings.take(name, post, need)
        if len(self._bookings.ledger.nodes) > 1:
            self._history.say("placed", f"{name} on {spot.node}: {why}", name)
        return spot

    def _launch_failed(self, name: str, error: LaunchError) -> None:
        if trouble := self._launcher.trouble():
            self._links.close(name)
            self._reconciliation.happened(events.Unplaced(name, trouble, True))
        else:
            why = f"it could not be started: {error}"
            self._reconciliation.happened(events.ProcessGone(name, why))

    def exited(self, name: str, code: int | None) -> None:
        """Handle the exit of a process, which the launcher reports."""
        # A launcher may report an exit twice, the second time without a code.
        running = self._processes.running.get(name)
        is_news = code is not None or running is not None
        self._processes.exited(name)
        is_ours, grew = name in self._killed, self._memory_kills.grew
        why = "" if running is None else kill_notes.take(self._keeper, running.pid)
        why = why or end_words(code, is_ours=is_ours, ran_out_of_memory=grew)
        self._killed.discard(name)
        process, cause = self._fleet.processes.get(name), why
        if code and code > 0 and (process is None or not self._is_new(process)):
            words = self._processes.last_words(name) or "none"
            why += f"; last line of its log: {words}"
        if process is not None and not self._reconciliation.is_ending:
            self._gone(name, why, cause)
        elif code:  # its loss has been handled, so only note the code
            self._history.say("exited", f"{name}: {why}", name)
        if is_news:
            self._processes.note_end(name, cause)

    def lost(self, name: str, error: MemberLostError) -> None:
        """Handle the loss of a process, which its control world reports."""
        # A control world has two members, and the process is always rank 1, so the
        # reason need not name the rank.
        why = error.reason.removeprefix("rank 1 was lost: ")
        why += f"; {error.evidence}"
        running = self._processes.running.get(name)
        if error.evidence.startswith("no heartbeat") and running is not None:
            why += local_words(running.pid, running.began)
        if error.has_ended:
            # Wait for the launcher to report the exit code, which is a better reason;
            # see ``exited``.
            self._loop.call_later(EXIT_S, self._gone_unless_told, name, why)
        else:
            self._gone(name, why)

    def unheard(self, name: str, error: StaleEpochError) -> None:
        """Handle a process that is alive but has declared this controller lost."""
        self._gone(name, f"it has declared the controller lost: {error}")

    def _gone_unless_told(self, name: str, why: str) -> None:
        if name in self._fleet.processes and not self._reconciliation.is_ending:
            self._gone(name, why)

    def _gone(self, name: str, why: str, cause: str = "") -> None:
        process = self._fleet.processes.get(name)
        if process is not None and self._is_new(process):
            words = self._processes.last_words(name)
            cause = words or cause or why
            starting = " while starting" * (process.phase in STARTING)
            why += f"{starting}; last line of its log: {words or 'none'}"
        self._reconciliation.happened(events.ProcessGone(name, why, cause=cause))

    def _is_new(self, process: Process) -> bool:
        """Return whether a process is starting, or its version is not active yet."""
        if process.phase in STARTING:
            return True
        is_active = self._fleet.active.get(process.model) == process.version
        is_up = process.phase in IS_UP
        return bool(process.model) and is_up and not is_active
