"""Interface of launchers, which start, signal and watch processes. It is small, so that
a cluster's scheduler can implement it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from multiworld.serve.controller.launchers.fork_server import WaitingServer
from multiworld.serve.machines.amounts import Location, Need, Node
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.wire.process_args import ProcessArgs


@dataclass(frozen=True, slots=True)
class RunningProcess:
    name: str
    pid: int
    began: int  # start time in the kernel's ticks; differs if ``pid`` is reused
    node: str = ""  # name of its machine; empty: the controller's


# Callback with the name of a process that has exited, and its exit code if known.
OnExit = Callable[[str, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherContext:
    app: AppSpec
    preload: Sequence[str]
    # Forked process that becomes the first fork server.
    waiting: WaitingServer | None = None
    env: dict[str, str]  # variables to add to the environment of every process
    logs: Path  # folder for the launcher's own output
    node: Node  # the controller's machine, with the resources for the service
    on_exit: OnExit
    on_nodes: Callable[[], None]  # called after machines or ``trouble`` have changed
    is_new: bool  # True if no process of this service runs yet


class Launcher(Protocol):
    """Starts processes on machines, signals them and watches for their exit."""

    def nodes(self) -> tuple[Node, ...]:
        """Return the machines that processes can run on."""

    def trouble(self) -> str:
        """Return why no process can start now; empty if one can."""

    async def launch(
        self, name: str, args: ProcessArgs, log: Path, spot: Location | None, need: Need
    ) -> RunningProcess:
        """Start a process that books ``need`` at ``spot``.

        Without ``spot``, it runs on the controller's machine. ``log`` receives its
        output. Raises ``LaunchError``. After a cancel, the process may still start.
        """

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; do nothing if it has exited."""

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        """Return the bytes of memory that a process uses, if more than ``limit``.

        None also means that the controller cannot measure the memory; replicas check
        their own memory, too.
        """

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        """Watch a process of an earlier controller; return False if it has exited."""

    def settle(self) -> None:
        """Stop the processes of an earlier controller that were not adopted."""

    async def close(self) -> None:
        """Shut the launcher down; the processes keep running."""


def began_at(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; None if it has exited."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
