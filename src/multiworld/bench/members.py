"""Runs the processes of a suite. Shell.

Each suite has a body, a function that all its processes run with their rank; rank 0
tells what it measured and how far it is.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 1800.0
"""Hang bound of one suite."""

Step = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured.

    Attributes:
        rounds: How often each contender is measured.
        is_quick: Fewer sizes and messages: to see that it runs.
        ports: Free ones, for rendezvous.
        apart: Contenders with environments of their own that take part.
        environments: The folder of those.
    """

    rounds: int = 5
    is_quick: bool = False
    ports: tuple[int, ...] = ()
    apart: tuple[str, ...] = ()
    environments: str = ""


class Teller:
    """What rank 0 says to the parent; other ranks say nothing."""

    def __init__(self, pipe: Connection | None) -> None:
        self._pipe = pipe

    def sample(
        self, kind: str, size: int, contender: str, unit: str, value: float
    ) -> None:
        """Tell one measured number."""
        self._send(("sample", (kind, size, contender, unit, value)))

    def step(self, done: float, text: str) -> None:
        """Tell how far it is, from 0 to 1."""
        self._send(("step", (done, text)))

    def note(self, text: str) -> None:
        """Tell something a reader has to know."""
        self._send(("note", text))

    def _send(self, what: Step) -> None:
        if self._pipe is not None:
            self._pipe.send(what)


Body = Callable[[int, Options, Teller], None]


def free_ports(count: int) -> tuple[int, ...]:
    """Return ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = tuple(int(sock.getsockname()[1]) for sock in sockets)
    for sock in sockets:
        sock.close()
    return ports


def _run(body: Body, rank: int, options: Options, pipe: Connection | None) -> None:
    import torch

    torch.set_num_threads(1)
    body(rank, options, Teller(pipe))


def run(body: Body, size: int, options: Options, hear: Callable[[Step], None]) -> None:
    """Run ``body`` in ``size`` processes; ``hear`` gets what rank 0 tells.

    Raises:
        RuntimeError: A process failed, or there was nothing to hear for too long.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    processes = [
        context.Process(
            target=_run, args=(body, rank, options, theirs if rank == 0 else None)
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        _hear(ours, processes, hear)
        for process in processes:
            process.join(30)
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes of the benchmark ended with {codes}")
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
                process.join()


def _hear(pipe: Connection, processes: list[Any], hear: Callable[[Step], None]) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if pipe.poll(0.2):
            try:
                hear(pipe.recv())
            except EOFError:
                return
        elif any(process.exitcode for process in processes):
            codes = [process.exitcode for process in processes]
            raise RuntimeError(f"a process of the benchmark failed: {codes}")
    raise RuntimeError(f"no result after {LIMIT_S:g} s")


def cpu_s() -> float:
    """Return the seconds of a core that this process and its ended children took."""
    times = os.times()
    return times.user + times.system
