"""Commands of ``multiworld`` that start at once, as forks of a warm process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
END_S = 5.0
"""Seconds that the process may take to exit."""

PASSING = ("PYTEST_CURRENT_TEST",)
"""Environment variables that no command reads."""


class Command:
    """A running command, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, handle: int, stdout: IO[str]) -> None:
        self.pid, self.stdout, self._handle = pid, stdout, handle

    def __del__(self) -> None:
        os.close(self._handle)

    def poll(self) -> int | None:
        return 0 if select.select([self._handle], [], [], 0.0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return 0

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    words: Sequence[str], cwd: Path, log: IO[bytes]
) -> subprocess.Popen[str] | Command:
    """Start a command in a session of its own; its output is a pipe.

    The command is a fork of a process that has imported all it needs, above all torch,
    because tests start dozens of services. If the environment variables are not those
    of the first call, it starts as usual: imported modules may have read them.
    """
    control, environment = _warm_process()
    if environment != _environment():
        return subprocess.Popen(
            [sys.executable, "-m", "multiworld.cli.main", *words],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    ours, theirs = os.pipe()
    order = json.dumps([str(cwd), *words]).encode()
    socket.send_fds(control, [order], [theirs, log.fileno()])
    os.close(theirs)
    pid, handles, *_ = socket.recv_fds(control, 100, 1)
    return Command(int(pid), handles[0], os.fdopen(ours))


def _environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name not in PASSING}


@functools.cache
def _warm_process() -> tuple[socket.socket, dict[str, str]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.warm"],
            cwd=ROOT,
            stdin=theirs.fileno(),
        )
    atexit.register(_end, process)
    atexit.register(ours.close)  # runs first, and makes the process exit
    return ours, _environment()


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:  # a forked child has the socket, too
        process.kill()
        process.wait()


def main() -> None:
    """Fork commands, on orders from standard input, until the input is closed."""
    from multiworld.cli.main import cli
    from multiworld.serve.controller import service
    from multiworld.serve.engine.models import huggingface

    for name in (*service.PRELOAD, *huggingface.preloaded_modules("llama")):
        __import__(name)
    control = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        order, handles, *_ = socket.recv_fds(control, 1 << 16, 2)
        if not order:
            return
        pid = os.fork()
        if not pid:
            control.close()
            _become(json.loads(order), handles)
            _run(cli)
        for handle in handles:
            os.close(handle)
        child = os.pidfd_open(pid)
        socket.send_fds(control, [str(pid).encode()], [child])
        os.close(child)


def _become(order: list[str], handles: list[int]) -> None:
    cwd, *words = order
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((nothing, *handles)):
        os.dup2(handle, number)
        os.close(handle)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = ["multiworld", *words]


def _run(command: object) -> None:
    code = 1
    try:
        assert callable(command)
        command()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
