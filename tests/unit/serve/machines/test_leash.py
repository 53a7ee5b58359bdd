"""Leashes on real processes, which die when the last holder of their leash does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld.serve.machines.leash import Leash, hold_leash, open_leash

WAIT_S = 30.0
SOURCE = str(Path(__file__).parents[4] / "src")
PROGRAM = """
import signal, sys, time
from multiworld.serve.machines import leash
if sys.argv[1] == "wear":
    leash.wear_leash(leash.open_leash(sys.argv[2]))
else:
    leash.hold_leash(sys.argv[2])
print("done", flush=True)
if sys.argv[3:]:
    signal.raise_signal(signal.SIGSTOP)
time.sleep(60)
"""


class Started:
    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def __call__(self, what: str, path: str, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, what, path, *more],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE},
        )
        self._all.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        return process

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


@pytest.fixture
def started() -> Iterator[Started]:
    made = Started()
    yield made
    made.end()


def test_wearer_is_killed_when_its_leash_is_let_go(started: Started) -> None:
    """The kernel kills it; the wearer need not notice."""
    leash = Leash()
    wearer = started("wear", leash.worn_at)
    leash.let_go()
    assert wearer.wait(WAIT_S) == -signal.SIGKILL


def test_stopped_wearer_is_killed_too(started: Started) -> None:
    """A process that hangs could not exit by itself."""
    leash = Leash()
    wearer = started("wear", leash.worn_at, "stopped")
    os.waitid(os.P_PID, wearer.pid, os.WSTOPPED | os.WNOWAIT)
    leash.let_go()
    assert wearer.wait(WAIT_S) == -signal.SIGKILL


def test_wearer_lives_as_long_as_its_last_holder(started: Started) -> None:
    leash = Leash()
    wearer = started("wear", leash.worn_at)
    holder = started("hold", leash.held_at)
    leash.let_go()
    with pytest.raises(subprocess.TimeoutExpired):
        wearer.wait(0.2)
    holder.kill()
    assert wearer.wait(WAIT_S) == -signal.SIGKILL


def test_leash_that_was_let_go_is_neither_worn_nor_held() -> None:
    leash = Leash()
    leash.let_go()
    with pytest.raises(OSError, match="No such file"):
        open_leash(leash.worn_at)
    with pytest.raises(OSError, match="No such file"):
        hold_leash(leash.held_at)
