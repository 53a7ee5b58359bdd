"""The interface of launchers: start a process, end it, tell when one has ended. Shell.

It is small, so that a cluster's scheduler fits behind it. See ``registry`` for how a
launcher is chosen.
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
        began: When it began, in the kernel's ticks; tells a reused ``pid`` apart.
        node: The machine that it runs on; empty for the controller's own.
    """

    name: str
    pid: int
    began: int
    node: str = ""


OnExit = Callable[[str, int | None], None]
"""Called with the name of a process that has ended, and its exit code if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherContext:
    """What a launcher is made from.

    Attributes:
        app: The spec of the service.
        preload: Modules that a warm process imports.
        env: Added to the environment of every process.
        logs: Folder for the launcher's own output.
        node: The controller's machine, as far as the service may use it.
        on_exit: To be told of every process that ends.
        on_nodes: To be told when machines were added or are gone, or ``trouble`` has
            changed.
        is_new: Whether nothing of this service runs yet.
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
    """Starts and ends processes."""

    def nodes(self) -> tuple[Node, ...]:
        """Return the machines that there are."""

    def trouble(self) -> str:
        """Say why nothing can be started now; empty if it can."""

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
            args: What it is started with.
            log: The file that its output goes to.
            spot: Where it runs; None for what belongs beside the controller.
            need: What it books there.

        Raises:
            LaunchError: It could not be started.

        Cancellation: the process may start all the same.
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
        """End the launcher; the processes go on.

        Cancellation: helper processes end when they notice.
        """


def began_at(pid: int) -> int | None:
    """Return when a process began, in ticks since the machine started; None if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
