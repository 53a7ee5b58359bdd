"""Process 1 of a container, and what it reaps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# Runs as process 1: the child leaves an orphan, prints all states, and waits.
PROGRAM = """
import os, signal, sys, time
from multiworld.serve.controller.process_one import leave_process_one
leave_process_one()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
if not os.fork():
    if not os.fork():
        time.sleep(0.2)  # its parent ends before it does
    os._exit(0)
os.wait()
while True:
    time.sleep(0.05)
    states = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            states.append(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0])
        except OSError:
            pass
    if len(states) == 2:
        break
print(os.getpid(), sorted(states), flush=True)
while True:
    time.sleep(1)
"""


def in_container() -> list[str]:
    """Return a command prefix that runs a program as process 1, or skip the test."""
    command = ["unshare", "--fork", "--pid", "--mount-proc"]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespace of processes: {tried.stderr.decode().strip()}")
    return command


def test_orphans_are_reaped_and_signals_forwarded() -> None:
    with subprocess.Popen(
        [*in_container(), sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid, _, states = process.stdout.readline().partition(" ")
        assert int(pid) > 1
        assert "Z" not in states
        (first,) = subprocess.run(
            ["pgrep", "-P", str(process.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        os.kill(int(first), signal.SIGTERM)
        assert process.wait(30) == 7


def test_any_other_process_is_left_alone() -> None:
    code = (
        "import os; before = os.getpid();"
        "from multiworld.serve.controller.process_one import leave_process_one;"
        "leave_process_one();"
        "assert os.getpid() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
