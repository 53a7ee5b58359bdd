"""Signals that end a command as Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PLAIN = "time.sleep(60)"
LOOP = "asyncio.run(asyncio.sleep(60))"
PROGRAM = """
import asyncio, signal, subprocess, sys, time
from multiworld.cli.ending import end_as_ctrl_c

{before}
end_as_ctrl_c()
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
try:
    print("ready", flush=True)
    {wait}
finally:
    print("ending", flush=True)
    time.sleep(0.5)  # a second signal meanwhile must not end this
    started.kill()
    print("ended", started.wait(), flush=True)
"""


def start(wait: str, before: str = "") -> subprocess.Popen[str]:
    """Start a program that has started another one, and wait until it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(wait=wait, before=before)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("wait", [PLAIN, LOOP])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("before", ["", "signal.signal(signal.SIGINT, signal.SIG_IGN)"])
def test_signals_end_a_command_with_what_it_started(
    wait: str, number: signal.Signals, before: str
) -> None:
    """``finally`` blocks run, even if SIGINT is ignored, as in a background job."""
    process = start(wait, before)
    process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "ending\n"
    process.send_signal(number)  # `timeout` and shells send it to the group as well
    out, err = process.communicate(timeout=20)
    assert out == "ended -9\n"
    assert "KeyboardInterrupt" in err
    assert process.returncode in (1, -signal.SIGINT)


def test_ignored_signals_stay_ignored() -> None:
    """A program that ``nohup`` started must outlive its terminal."""
    process = start(PLAIN, "signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out == "ending\nended -9\n"
