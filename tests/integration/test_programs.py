"""Programs for pymultiworld, which run unchanged and survive a killed worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.words import unhurried

PROGRAMS = Path(__file__).parents[1] / "programs"


@pytest.fixture
def started(
    compiled: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ExitStack]:
    for name in ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.delenv(name, raising=False)
        if name in compiled:
            monkeypatch.setenv(name, compiled[name])
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, program: str, *args: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", PROGRAMS / program, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return process


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Read lines until one starts with ``text``; the test's timeout limits it."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(text):
            return lines
    raise AssertionError(f"{text!r} never came: {''.join(lines)}")


@pytest.mark.parametrize(
    "leader_first", [pytest.param(True, marks=pytest.mark.heavy), False]
)
def test_programs_for_the_prototype_run_unchanged(
    started: ExitStack, leader_first: bool
) -> None:
    ports = [free_port(), free_port()]

    def start_leader() -> subprocess.Popen[str]:
        return start(started, "leader.py", "--ports", *ports)

    leader = start_leader() if leader_first else None
    workers = [
        start(
            started,
            *("worker.py", "--world", f"world{number}", "--port", port),
            *("--steps", 150 if number == 1 else 1_000_000),
        )
        for number, port in enumerate(ports, start=1)
    ]
    leader = leader or start_leader()
    lines = read_until(leader, "world2: received 50")
    workers[1].kill()
    lines += read_until(leader, "end\n")
    output = "".join(lines)
    assert "world1: received 150 [149.0, 149.0, 149.0, 149.0]" in output
    assert "world1: done after 150" in output
    assert "world2: caught MemberLostError: world2 broken: rank 1 was lost" in output
    assert leader.wait() == 0
    assert leader.stdout is not None
    rest = unhurried(leader.stdout.read())
    assert rest == "", "nothing after the end: no warning, no traceback"
    assert workers[0].wait() == 0
    assert workers[0].stdout is not None
    assert unhurried(workers[0].stdout.read()) == ""
