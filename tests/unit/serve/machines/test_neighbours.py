"""The process outside a service that takes a machine's cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from multiworld.serve.machines import neighbours
from multiworld.serve.machines.neighbours import Neighbours


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def test_busy_process_is_named_unless_it_is_one_of_ours(
    monkeypatch: pytest.MonkeyPatch, busy: subprocess.Popen[bytes]
) -> None:
    """This test's other programs are no concern: only the two processes exist."""
    only = [psutil.Process(), psutil.Process(busy.pid)]
    monkeypatch.setattr(psutil, "process_iter", lambda: iter(only))
    monkeypatch.setattr(neighbours, "LOOK_S", 0.2)
    others, ours = Neighbours(), Neighbours()
    assert others.most(()) == ours.most(()) == ""
    for _ in range(100):
        time.sleep(0.3)
        assert ours.most({os.getpid()}) == ""
        if found := others.most({1}):
            break
    assert f"(process {busy.pid}: " in found


def test_look_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds."""
    looks: list[int] = []
    monkeypatch.setattr(psutil, "process_iter", lambda: looks)
    now = [100.0]
    looking = Neighbours(lambda: now[0])
    assert looking.most(()) == ""
    monkeypatch.setattr(psutil, "process_iter", lambda: 1 / 0)
    assert looking.most(()) == ""
    now[0] += neighbours.LOOK_S
    with pytest.raises(ZeroDivisionError):
        looking.most(())
