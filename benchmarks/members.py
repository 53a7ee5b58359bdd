"""The processes of a suite.

Each suite has a body: a function that all its processes run, each with its rank. Rank 0
reports samples and progress to the parent.
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
"""Seconds after which a suite counts as hung."""

Step = tuple[str, Any]
"""Report of rank 0: its kind ("sample", "step" or "note") and its content."""


@dataclass(frozen=True, slots=True)
class Options:
    """Extent of the measurements.

    Attributes:
        rounds: Number of measurements of each contender.
        is_quick: Whether to measure fewer sizes and messages, to test the suite only.
        ports: Free ports for rendezvous.
        apart: Contenders to include that have their own environments.
        environments: Folder of those environments.
    """

    rounds: int = 5
    is_quick: bool = False
    ports: tuple[int, ...] = ()
    apart: tuple[str, ...] = ()
    environments: str = ""


class Reporter:
    """Sends reports from rank 0 to the parent, and drops those of other ranks."""

    def __init__(self, pipe: Connection | None) -> None:
        self._pipe = pipe

    def sample(
        self, kind: str, size: int, contender: str, unit: str, value: float
    ) -> None:
        """Report one measured number; see ``samples.Series`` for the arguments."""
        self._send(("sample", (kind, size, contender, unit, value)))

    def step(self, done: float, text: str) -> None:
        """Report progress from 0 to 1, and the current step in words."""
        self._send(("step", (done, text)))

    def note(self, text: str) -> None:
        """Report a remark that a reader of the results must know."""
        self._send(("note", text))

    def _send(self, what: Step) -> None:
        if self._pipe is not None:
            self._pipe.send(what)


Body = Callable[[int, Options, Reporter], None]
"""Function that every process of a suite runs, with its rank."""


def free_ports(count: int) -> tuple[int, ...]:
    """Return TCP ports of loopback that are free now."""
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
    body(rank, options, Reporter(pipe))


def run(
    body: Body, size: int, options: Options, on_step: Callable[[Step], None]
) -> None:
    """Run a body in ``size`` processes, and wait for them."""
    # Raises RuntimeError if a process failed, or if the suite took longer than
    # ``LIMIT_S``.
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
        _read_steps(ours, processes, on_step)
        for process in processes:
            process.join(30)
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(f"processes of the benchmark failed: exit codes {codes}")
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                process.kill()
                process.join()


def _read_steps(
    pipe: Connection, processes: list[Any], on_step: Callable[[Step], None]
) -> None:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if pipe.poll(0.2):
            try:
                on_step(pipe.recv())
            except EOFError:
                return
        elif any(process.exitcode for process in processes):
            codes = [process.exitcode for process in processes]
            raise RuntimeError(f"a process of the benchmark failed: exit codes {codes}")
    raise RuntimeError(f"the benchmark did not finish within {LIMIT_S:g} s")


def cpu_s() -> float:
    """Return the CPU seconds that this process has used."""
    times = os.times()
    return times.user + times.system
