"""The process group of an engine, which exits with its holder; with real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multiworld.serve.engine.external import engine_process
from multiworld.serve.engine.external.engine_process import (
    BURST,
    LAST_LINES,
    LINE_BYTES,
    EngineProcess,
    HeldPort,
    free_port,
    pass_on,
)
from tests.until import until

WAIT_S = 30.0
SOURCE = str(Path(__file__).parents[5] / "src")

FAMILY = "sleep 60 & echo $$ $! > {0}.new; mv {0}.new {0}; wait"
"""A shell with a child, which writes their process ids to a file."""

STUBBORN = "trap '' TERM; " + FAMILY + "; sleep 60"

HOLDER = """
import sys, time
from multiworld.serve.engine.external.engine_process import EngineProcess
EngineProcess(["sh", "-c", sys.argv[1]], {})
time.sleep(60)
"""

Make = Callable[..., EngineProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[EngineProcess] = []

    def start(program: str, **options: Any) -> EngineProcess:
        made.append(EngineProcess(["sh", "-c", program], {"WORD": "hello"}, **options))
        return made[-1]

    yield start
    for one in made:
        one.kill()


async def family(path: Path) -> list[int]:
    await until(path.exists)
    text = path.read_text()  # noqa: ASYNC240 - a line
    return [int(word) for word in text.split()]


class Watched:
    """Processes that are to exit, whoever their parents are."""

    def __init__(self, pids: list[int]) -> None:
        self._left = [os.pidfd_open(pid) for pid in pids]

    def are_gone(self, within_s: float) -> bool:
        limit = time.monotonic() + within_s
        for pidfd in self._left:
            left = max(0.0, limit - time.monotonic())
            if not select.select([pidfd], [], [], left)[0]:
                return False
        return True

    def end(self) -> None:
        for pidfd in self._left:
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has exited
            os.close(pidfd)


def hold(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, program],
        env={**os.environ, "PYTHONPATH": SOURCE},
    )


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_group_is_killed_with_its_holder(
    tmp_path: Path, is_stopped: bool
) -> None:
    """The kernel kills the group, even if it is stopped."""
    program = FAMILY.format(tmp_path / "pids")
    holder = hold(program)
    try:
        pids = await family(tmp_path / "pids")
        watched = Watched(pids)
        try:
            assert {os.getpgid(pid) for pid in pids} == {pids[0]} != {os.getpgrp()}
            if is_stopped:
                os.killpg(pids[0], signal.SIGSTOP)
            assert not watched.are_gone(0.1)
            holder.kill()
            assert watched.are_gone(WAIT_S)
        finally:
            watched.end()
    finally:
        holder.kill()
        holder.wait(WAIT_S)


@pytest.mark.parametrize("program", [FAMILY, STUBBORN])
async def test_close_ends_the_whole_group(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(engine_process, "END_S", 0.2)
    process = make(program.format(tmp_path / "pids"))
    watched = Watched(await family(tmp_path / "pids"))
    try:
        await process.close()
        assert watched.are_gone(WAIT_S)
    finally:
        watched.end()
    await process.close()  # nothing is left to close
    process.kill()


async def test_engine_may_exit_in_its_own_way(make: Make, tmp_path: Path) -> None:
    """It gets SIGTERM and has time to exit before it is killed."""
    program = "trap 'echo > {0}.bye; exit 3' TERM; echo > {0}; sleep 60 & wait"
    path = tmp_path / "here"
    process = make(program.format(path))
    await until(path.exists)
    await process.close()
    assert (tmp_path / "here.bye").exists()
    assert await process.wait() == 3


async def test_wait_returns_the_exit_code(make: Make) -> None:
    process = make("exit 5")
    assert {*await asyncio.gather(process.wait(), process.wait())} == {5}
    assert await process.wait() == 5
    killed = make("sleep 60")
    waiting = asyncio.ensure_future(killed.wait())
    await asyncio.sleep(0)
    killed.kill()
    assert await waiting == -signal.SIGKILL


async def test_wait_can_be_cancelled(make: Make) -> None:
    process = make("sleep 60")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.05)
    process.kill()
    assert await process.wait() == -signal.SIGKILL


async def test_engine_has_the_environment_and_no_input(
    make: Make, tmp_path: Path
) -> None:
    process = make(f'echo "$WORD $PATH" > {tmp_path / "env"}; cat')
    assert await process.wait() == 0
    assert (tmp_path / "env").read_text() == f"hello {os.environ['PATH']}\n"


async def test_command_that_does_not_exist_ends_with_an_error() -> None:
    """It looks like an engine that does not start."""
    process = EngineProcess(["/no/such/program"], {})
    try:
        assert await process.wait() != 0
    finally:
        process.kill()


async def test_seconds_are_counted_while_a_process_of_the_group_is_stopped(
    make: Make, tmp_path: Path
) -> None:
    """Time counts from when the stop is first seen, until all processes run again."""
    now = 0.0
    process = make(FAMILY.format(tmp_path / "pids"), clock=lambda: now)
    _, child = await family(tmp_path / "pids")
    assert process.stopped_s() == 0.0
    os.kill(child, signal.SIGSTOP)

    def is_stopped() -> bool:
        nonlocal now
        now += 1.0
        return process.stopped_s() > 0.0

    await until(is_stopped)
    before = process.stopped_s()
    now += 4.0
    assert process.stopped_s() == before + 4.0
    os.kill(child, signal.SIGCONT)
    await until(lambda: process.stopped_s() == 0.0)
    now = 0.0
    os.kill(child, signal.SIGSTOP)
    stat = Path(f"/proc/{child}/stat")
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    assert process.stopped_s() == 0.0
    now = 2.5
    assert process.stopped_s() == 2.5, "a clock may begin at 0"
    process.kill()


def test_free_port_is_not_taken() -> None:
    assert 0 < free_port() < 65536


def test_killing_waits_for_no_process_that_cannot_exit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be stuck in a driver, and its replica would never exit."""
    engine, limits = make("sleep 60"), []

    def wait(process: object, timeout: float | None = None) -> int:
        limits.append(timeout)
        raise subprocess.TimeoutExpired("sh", timeout or 0.0)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", wait)
        engine.kill()
    assert limits == [engine_process.KILLED_S]


def test_engines_that_start_together_get_different_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until an engine listens on a port, the system may give it out again."""
    drawn = iter([5000, 5000, 5001, 5000])
    monkeypatch.setattr(engine_process, "free_port", lambda: next(drawn))
    first, second = HeldPort(), HeldPort()
    assert (first.number, second.number) == (5000, 5001)
    first.release()
    third = HeldPort()
    assert third.number == 5000
    second.release()
    third.release()


def test_port_cannot_be_held_where_the_system_refuses_such_sockets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refused(socket.socket):
        def bind(self, address: Any) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(engine_process, "free_port", lambda: 5000)
    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(PermissionError):
        HeldPort()


def test_output_of_an_engine_is_bounded_and_ends_with_its_last_words() -> None:
    """An endless line takes no memory, and a full disk does not stop the output."""
    source, inlet = os.pipe()
    found: list[bytes] = []
    fails = [True]

    def write(data: bytes) -> None:
        if fails and fails.pop():
            raise OSError("no space left on device")
        found.append(data)

    passing = threading.Thread(target=pass_on, args=[source, write, lambda: 0.0])
    passing.start()
    with open(inlet, "wb") as pipe:
        pipe.write(b"lost on a full disk\n" + b"x" * 3 * LINE_BYTES + b"\n")
        pipe.write(b"a token\n" * (2 * BURST // 8))
        pipe.write(b"it ran out of memory\n")
    passing.join(10.0)
    assert not passing.is_alive()
    assert max(map(len, found)) == LINE_BYTES
    assert sum(map(len, found)) <= BURST + LAST_LINES * 100
    assert found[-1] == b"it ran out of memory\n"
