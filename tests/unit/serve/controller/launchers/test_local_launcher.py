"""The local launcher, with real processes forked from a fork server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.base import RunningProcess, began_at
from multiworld.serve.controller.launchers.fork_server import WaitingServer
from multiworld.serve.controller.launchers.helper_process import HelperProcess
from multiworld.serve.controller.launchers.local import LocalLauncher
from multiworld.serve.controller.launchers.protocol import Line
from multiworld.serve.machines.amounts import Location, Need
from multiworld.serve.machines.usage import family_of
from multiworld.serve.wire.process_args import ProcessArgs
from tests.unit.serve.controller.launchers.contexts import context
from tests.unit.serve.edges import until

WAIT_S = 50.0
FAKE_ENTRY = "tests.unit.serve.controller.launchers.fake_entry"
NEED = Need()


def python_path() -> str:
    root = Path(__file__).parents[5]
    paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(paths)


def args(what: str) -> ProcessArgs:
    """Return the arguments of a process in which ``fake_entry`` does `what`."""
    return ProcessArgs(
        app="app", name=what, role="worker", store="", silence_s=1.0, orphan_s=1.0
    )


class Launched:
    def __init__(
        self, folder: Path, *more: str, waiting: WaitingServer | None = None
    ) -> None:
        self.folder = folder
        self.exits: list[tuple[str, int | None]] = []
        self.told = asyncio.Event()
        env = {"PYTHONPATH": python_path(), "GREETING": "hello"}
        self.launcher = LocalLauncher(
            context(
                "local",
                folder,
                preload=[FAKE_ENTRY, "no.such.module", *more],
                env=env,
                on_exit=self._exited,
                waiting=waiting,
            )
        )

    def _exited(self, name: str, code: int | None) -> None:
        self.exits.append((name, code))
        self.told.set()

    async def launch(self, name: str, what: str) -> RunningProcess:
        log = self.folder / f"{name}.log"
        spot = Location("here")
        return await self.launcher.launch(name, args(what), log, spot, NEED)

    async def exit_of(self, name: str) -> int | None:
        async with asyncio.timeout(WAIT_S):
            while name not in dict(self.exits):
                self.told.clear()
                await self.told.wait()
        return next(code for known, code in self.exits if known == name)

    async def log_of(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        async with asyncio.timeout(WAIT_S):
            while not (log.exists() and log.read_text().endswith("\n")):  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0)
        return log.read_text()

    async def end(self, running: RunningProcess) -> int:
        """Terminate a process; return the exit code that the fork server reports."""
        await self.log_of(running.name)
        self.launcher.kill(running, signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            while True:
                for name, code in self.exits:
                    if name == running.name and code is not None:
                        return code
                self.told.clear()
                await self.told.wait()


def children() -> set[int]:
    """Return all descendants of this process."""
    return set(family_of(os.getpid())[1:])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
async def launched(tmp_path: Path) -> AsyncIterator[Launched]:
    made = Launched(tmp_path)
    yield made
    await made.launcher.close()


async def test_process_runs_with_its_log_its_environment_and_its_session(
    launched: Launched,
) -> None:
    running = await launched.launch("a", "says")
    assert (running.name, running.node) == ("a", "here")
    said = await launched.log_of("a")
    assert said == f"hello {running.pid} {running.pid}\n"
    assert "No module named 'no'" in (launched.folder / "launcher.log").read_text()
    assert await launched.end(running) == 7
    assert began_at(running.pid) is None


async def test_process_is_killed_and_only_the_one_that_is_meant(
    launched: Launched,
) -> None:
    """A process ID that the system has reused is left alone."""
    one, other = await asyncio.gather(
        launched.launch("a", "waits"), launched.launch("b", "waits")
    )
    assert one.began == began_at(one.pid)
    launched.launcher.kill(RunningProcess("b", other.pid, other.began - 1))
    launched.launcher.kill(RunningProcess("c", 2**22 + 1, 0))
    launched.launcher.kill(one)
    assert await launched.exit_of("a") in (-signal.SIGKILL, None)
    launched.launcher.kill(one)
    assert began_at(other.pid) == other.began
    assert launched.launcher.outgrown(other, 1) is not None
    assert launched.launcher.outgrown(other, 2**40) is None
    launched.launcher.kill(other, signal.SIGTERM)
    assert await launched.exit_of("b") in (-signal.SIGTERM, None)


async def test_process_that_raises_has_its_traceback_in_its_log(
    launched: Launched,
) -> None:
    assert await launched.end(await launched.launch("a", "raises")) == 1
    assert "KeyError: 'as asked'" in (launched.folder / "a.log").read_text()
    assert await launched.end(await launched.launch("b", "says")) == 7


async def test_server_that_dies_fails_what_waits_and_is_started_again(
    launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await launched.launch("a", "waits")
    server = parent_of(running.pid)
    os.kill(server, signal.SIGSTOP)
    orders: list[Line] = []
    send = HelperProcess.send

    def noted(helper: HelperProcess[Any], order: Line) -> None:
        send(helper, order)
        orders.append(order)

    monkeypatch.setattr(HelperProcess, "send", noted)
    waiting = asyncio.ensure_future(launched.launch("b", "says"))
    await until(lambda: orders)
    os.kill(server, signal.SIGKILL)
    with pytest.raises(LaunchError, match="b: the fork server has exited"):
        await asyncio.wait_for(waiting, WAIT_S)
    assert began_at(running.pid) == running.began
    assert await launched.end(await launched.launch("c", "says")) == 7
    launched.launcher.kill(running)
    assert await launched.exit_of("a") is None  # nobody who is left knows the code


async def test_module_that_starts_a_thread_is_left_to_the_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork would copy the module's locks without the thread."""
    made = Launched(tmp_path, f"{FAKE_ENTRY}_threads", "tests.no_such_module")
    try:
        assert await made.end(await made.launch("a", "says")) == 7
    finally:
        await made.launcher.close()
    assert f"{FAKE_ENTRY}_threads starts a thread" in caplog.text


async def test_fork_server_that_gets_a_thread_later_is_replaced(tmp_path: Path) -> None:
    """Its replacement imports nothing: which module started the thread is unknown."""
    others = children()
    made = Launched(tmp_path, f"{FAKE_ENTRY}_late_thread")
    try:
        await made.launcher.warm()
        (server,) = children() - others
        await until(lambda: len(os.listdir(f"/proc/{server}/task")) == 2)
        with pytest.raises(LaunchError, match="a: the fork server has 2 threads"):
            await made.launch("a", "says")
        await until(lambda: bool(children() - others - {server}))
        assert (await made.launch("b", "says")).pid
    finally:
        await made.launcher.close()


async def test_processes_of_an_earlier_controller_are_watched(
    launched: Launched,
) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(words)  # noqa: ASYNC220 - asyncio would watch it, too
    began = began_at(process.pid)
    assert began is not None
    running = RunningProcess("old", process.pid, began)
    other = RunningProcess("old", process.pid, began + 1)
    assert not launched.launcher.adopt(other, ranks=1)
    assert launched.launcher.adopt(running, ranks=1)
    process.kill()
    assert await launched.exit_of("old") is None
    assert began_at(process.pid) is None  # not even as a zombie
    process.wait()
    assert not launched.launcher.adopt(running, ranks=1)


async def test_processes_outlive_the_launcher(launched: Launched) -> None:
    running = await launched.launch("a", "waits")
    await launched.launcher.close()
    assert began_at(running.pid) == running.began
    again = Launched(launched.folder)
    assert again.launcher.adopt(running, ranks=1)
    again.launcher.kill(running)
    assert await again.exit_of("a") is None
    assert launched.exits == []
    await again.launcher.close()


async def test_process_whose_log_cannot_be_opened_serves(launched: Launched) -> None:
    """A full disk does not keep a lost replica from being replaced."""
    running = await launched.launch("no/such/folder", "says")
    log = launched.folder / "launcher.log"
    async with asyncio.timeout(WAIT_S):
        while f"hello {running.pid}" not in log.read_text():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
    assert "cannot open" in log.read_text()
    assert began_at(running.pid) == running.began
    launched.launcher.kill(running)
