"""The controller's supervision of the stream keeper."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld.serve.controller import keeper_supervisor
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.record import StateFolder
from multiworld.serve.controller.keeper_supervisor import WORDS, KeeperSupervisor
from multiworld.serve.keeper.frames import Kind, entry, frame
from multiworld.serve.keeper.process import COUNTS
from multiworld.serve.spec.schema import AppSpec

OF_ANOTHER_RELEASE = """
from multiworld.serve.keeper import process
process.PROTOCOL = 99
process.main()
"""


@pytest.mark.timeout(60)
async def test_keeper_of_another_protocol_is_replaced(tmp_path: Path) -> None:
    """It refuses our greeting, and would give no gateway a connection."""
    folder = StateFolder(tmp_path)
    folder.make()
    command = [sys.executable, "-c", OF_ANOTHER_RELEASE]
    command += ["--socket", str(folder.keeper), "--silence", "2"]
    command += ["--memory", "8", "--active", "1"]
    model = {"factory": "a:b", "stages": [{"name": "all"}]}
    app = AppSpec.model_validate({"app": "a", "models": {"m": model}})
    history = History()
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as old,  # noqa: ASYNC220
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        assert old.stdout is not None
        assert await asyncio.to_thread(old.stdout.readline)
        supervisor = KeeperSupervisor(folder, listener, history, lambda: app)
        supervising = asyncio.ensure_future(supervisor.run())
        try:
            async with asyncio.timeout(40):
                while old.poll() is None or supervisor.pid in (0, old.pid):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert [event.kind for event in history.since(0)].count("keeper") == 2
        finally:
            supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervising
            await supervisor.end()
            if old.poll() is None:
                old.kill()
    assert not _is_running(supervisor.pid)


def slow_python(folder: Path) -> str:
    """Return a program that notes its process id in ``pids``, and does nothing."""
    slow = folder / "slow"
    slow.write_text(f"#!/bin/sh\necho $$ >> {folder}/pids\nexec sleep 50\n")
    slow.chmod(0o700)
    return str(slow)


def supervisor_of(
    path: Path, listener: socket.socket, history: History | None = None
) -> KeeperSupervisor:
    folder = StateFolder(path)
    folder.make()
    model = {"factory": "a:b", "stages": [{"name": "all"}]}
    app = AppSpec.model_validate({"app": "a", "models": {"m": model}})
    return KeeperSupervisor(folder, listener, history or History(), lambda: app)


async def test_client_is_not_refused_while_the_keeper_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateways may be ready before the keeper has started."""
    monkeypatch.setattr(sys, "executable", slow_python(tmp_path))
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        supervisor = supervisor_of(tmp_path, listener)
        supervising = asyncio.ensure_future(supervisor.run())
        await asyncio.sleep(0)
        client.connect(listener.getsockname())
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising


async def test_keeper_that_does_not_start_is_killed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, both would accept clients once they have started."""
    monkeypatch.setattr(sys, "executable", slow_python(tmp_path))
    monkeypatch.setattr(keeper_supervisor, "KEEPER_START_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = supervisor_of(tmp_path, listener)
        supervising = asyncio.ensure_future(supervisor.run())
        pids: list[int] = []
        async with asyncio.timeout(30):
            while len(pids) < 2:
                await asyncio.sleep(0.05)
                with contextlib.suppress(FileNotFoundError):
                    pids = [int(n) for n in (tmp_path / "pids").read_text().split()]
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
    async with asyncio.timeout(30):
        while any(map(_is_running, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.timeout(60)
async def test_keeper_whose_place_another_takes_exits(tmp_path: Path) -> None:
    """A controller that was killed may have left a keeper that was still starting."""
    path = tmp_path / "keep.sock"
    command = [sys.executable, "-m", "multiworld.serve.keeper.process"]
    command += ["--socket", str(path), "--silence", "2", "--memory", "8"]
    command += ["--active", "1"]
    running = []
    try:
        for _ in range(2):
            made = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220
            running.append(made)
            assert made.stdout is not None
            assert await asyncio.to_thread(made.stdout.readline)
        assert await asyncio.to_thread(running[0].wait, 20) == 0
        await asyncio.sleep(1.0)
        assert running[1].poll() is None
        assert os.listdir(tmp_path) == ["keep.sock"]
    finally:
        for made in running:
            made.kill()
            made.wait()
            assert made.stdout is not None
            made.stdout.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def test_counts_of_a_keeper_that_is_adopted_are_not_news(tmp_path: Path) -> None:
    """The controller before this one has recorded them."""
    folder = StateFolder(tmp_path)
    folder.make()
    totals = [COUNTS.pack(57, 2, 3, 0, 1)]
    answered, history = asyncio.Event(), History()

    async def keeper(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while await reader.read(4096):
            writer.write(frame([entry(Kind.BEAT, 0, 0, totals[-1])]))
            answered.set()
        writer.close()

    async with await asyncio.start_unix_server(keeper, folder.keeper):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            supervisor = supervisor_of(tmp_path, listener, history)
            supervising = asyncio.ensure_future(supervisor.run())
            try:
                await answered.wait()
                totals.append(COUNTS.pack(57, 3, 3, 0, 1))
                async with asyncio.timeout(40):
                    while not history.since(0):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            finally:
                supervising.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await supervising
    assert [event.text for event in history.since(0)] == [WORDS["closed"].format(1)]
