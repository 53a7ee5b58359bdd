"""Interface of launchers, which start, signal and watch processes.

It is small, so that a cluster's scheduler can implement it. ``registry`` chooses the
launcher of a service.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from multiworld.serve.resources.amounts import Location, Need, Node
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.transport.process_args import ProcessArgs


@dataclass(frozen=True, slots=True)
class RunningProcess:
    """A process of the service.

    Attributes:
        name: Its name in the service.
        pid: Its process id.
        began: Start time in the kernel's ticks; distinguishes a reused ``pid``.
        node: Name of its machine; empty for a process beside the controller.
    """

    name: str
    pid: int
    began: int
    node: str = ""


OnExit = Callable[[str, int | None], None]
"""Callback with the name of a process that has exited, and its exit code if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherContext:
    """Arguments for creating a launcher.

    Attributes:
        app: The spec of the service.
        preload: Modules that the fork server imports.
        env: Variables added to the environment of every process.
        logs: Folder for the launcher's own output.
        node: The controller's machine, with the resources that the service may use.
        on_exit: Called for every process that exits.
        on_nodes: Called when machines were added or removed, or ``trouble`` has
            changed.
        is_new: True if no process of this service runs yet.
    """

    app: AppSpec
    preload: Sequence[str]
    env: dict[str, str]
    logs: Path
    node: Node
    on_exit: OnExit
    on_nodes: Callable[[], None]
    is_new: bool


class Launcher(Protocol):
    """Starts processes on machines, signals them and watches for their exit."""

    def nodes(self) -> tuple[Node, ...]:
        """Return the machines that processes can run on."""

    def trouble(self) -> str:
        """Return why no process can be started now; empty if one can."""

    async def launch(
        self,
        name: str,
        args: ProcessArgs,
        log: Path,
        spot: Location | None,
        need: Need,
    ) -> RunningProcess:
        """Start a process.

        Args:
            name: Its name in the service.
            args: Its arguments.
            log: File for its output.
            spot: Machine and GPU to run on; None: beside the controller.
            need: Resources that it books there.

        Raises:
            LaunchError: The process could not be started.

        Cancellation: The process may start all the same.
        """

    def kill(self, running: RunningProcess, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process; do nothing if it has exited.

        Args:
            running: The process.
            number: Number of the signal.
        """

    def outgrown(self, running: RunningProcess, limit: int) -> int | None:
        """Return the bytes of memory that a process uses, if more than ``limit``.

        None if it uses less, or if this process cannot see it. Every replica also
        checks its own memory.

        Args:
            running: The process.
            limit: Bytes that it may use.
        """

    def adopt(self, running: RunningProcess, ranks: int) -> bool:
        """Watch a process that an earlier controller started.

        Args:
            running: The process.
            ranks: Number of its ranks.

        Returns:
            False if it has exited.
        """

    def settle(self) -> None:
        """End the processes of an earlier controller that were not adopted."""

    async def close(self) -> None:
        """Shut the launcher down; the processes go on.

        Cancellation: Helper processes exit once they see that their socket is closed.
        """


def began_at(pid: int) -> int | None:
    """Return a process's start time, in ticks since the machine booted.

    None if the process has exited.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
