"""The processes of a service, and their logs."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from multiworld.serve.controller.launchers.base import (
    Launcher,
    RunningProcess,
    began_at,
)
from multiworld.serve.controller.processes import (
    KEPT_LOGS,
    Processes,
    end_words,
    local_words,
)
from multiworld.serve.machines.amounts import Location, Need, Node
from multiworld.serve.machines.bookings import Bookings
from multiworld.serve.wire.process_args import ProcessArgs


class StandIn:
    async def launch(
        self, name: str, args: Any, log: Path, spot: Any, need: Need
    ) -> RunningProcess:
        return RunningProcess(name, 1, 1)


@pytest.mark.parametrize(
    ("code", "is_ours", "ran_out", "words"),
    [
        (None, False, False, "it ended"),
        (3, False, True, "it ended with exit code 3"),
        (-15, False, True, "it ended with SIGTERM"),
        (-9, False, False, "it ended with SIGKILL"),
        (-9, True, True, "the controller killed it"),
        (
            -9,
            False,
            True,
            "it ended with SIGKILL, and the kernel has killed a process for lack of "
            "memory since the last check",
        ),
    ],
)
def test_exit_of_a_process_is_described(
    code: int | None, is_ours: bool, ran_out: bool, words: str
) -> None:
    found = end_words(code, is_ours=is_ours, ran_out_of_memory=lambda: ran_out)
    assert found == words


def test_silent_process_of_this_machine_runs_or_is_stopped() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        began = began_at(process.pid)
        assert began is not None
        assert "runs on this machine" in local_words(process.pid, began)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert local_words(process.pid, began) == "; its process is stopped"
        assert local_words(process.pid, began + 1) == ""
        process.kill()


def test_logs_of_running_and_of_recent_processes_are_kept(tmp_path: Path) -> None:
    """A replica that dies and is replaced for weeks must not fill the disk."""
    processes = Processes(cast("Launcher", StandIn()), Bookings(), tmp_path)
    others = {"launcher.log", "launcher-12345678.log", "store.log", "ray.log"}
    for name in others:
        (tmp_path / name).touch()

    times = itertools.count(1)

    def start(name: str) -> None:
        args = cast("ProcessArgs", SimpleNamespace(name=name))
        processes.add(asyncio.run(processes.launch(args, None, Need())))
        log = processes.log_of(name)
        log.touch()
        os.utime(log, (next(times),) * 2)

    start("gateway/1")
    count = KEPT_LOGS + 50
    for number in range(2, count + 1):
        name = f"llama-3/{number % 2}/{10 * number}"  # refused placements take numbers
        start(name)
        if number > 2:
            processes.exited(name)
    kept = {path.name for path in tmp_path.iterdir()}
    numbers = range(count - KEPT_LOGS, count + 1)  # and the one that ended just now
    recent = {f"llama-3-{number % 2}-{10 * number}.log" for number in numbers}
    assert kept == others | recent | {"gateway-1.log", "llama-3-0-20.log"}


@pytest.mark.parametrize("kind", ["text", "json"])
def test_log_says_how_its_process_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("MULTIWORLD_LOG_FORMAT", kind)
    processes = Processes(cast("Launcher", StandIn()), Bookings(), tmp_path)
    log = processes.log_of("m/0/7")
    processes.note_end("m/0/7", "it ended with SIGKILL")
    assert not log.exists(), "the log of another machine"
    log.write_text("the stage was loaded\n")
    processes.note_end("m/0/7", "it ended with SIGKILL")
    first, last = log.read_text().splitlines()
    assert first == "the stage was loaded"
    assert "this process has ended: it ended with SIGKILL" in last
    assert (last[0] == "{") == (kind == "json")


async def test_launch_that_fails_before_it_begins_keeps_no_booking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the logs cannot be listed: too many open files."""
    ledger, need = Bookings([Node("n", 1.0, 2**30)]), Need(cpus=1.0)
    processes = Processes(cast("Launcher", StandIn()), ledger, tmp_path)
    ledger.book("m/0/1", ("m", "1", 0), Location("n"), need)
    args = ProcessArgs(
        app="a", name="m/0/1", role="worker", store="", silence_s=1.0, orphan_s=1.0
    )

    def fail(*_: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "glob", fail)
    with pytest.raises(OSError, match="Too many"):
        await processes.launch(args, Location("n"), need)
    assert not ledger.bookings
