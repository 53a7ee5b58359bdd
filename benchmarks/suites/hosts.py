"""Suite "hosts": TCP between two network namespaces, beside a plain socket.

The suite runs this module in each namespace:
``python -m benchmarks.suites.hosts``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contenders import OneWorld, RawSocket, connect, stream
from benchmarks.members import Options, Step
from multiworld.config import WorldConfig

BASELINE = "tcp socket"
SIZES = (4_096, 409_600, 4_194_304)
BUDGET_BYTES = 256 * 1024 * 1024
"""Bytes of one stream."""

LIMIT_S = 600.0


class Tcp(RawSocket):
    """A plain blocking socket between the hosts."""

    def __init__(self, rank: int, address: tuple[str, int]) -> None:
        self.sock = connect(socket.AF_INET, address, is_server=rank == 0)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Across(OneWorld):
    """A world whose store is on the other host."""

    def __init__(self, rank: int, host: str, port: int) -> None:
        self._host = host
        super().__init__(rank, port)

    async def _join(
        self, rank: int, port: int, backend: str, config: WorldConfig | None
    ) -> tuple[Any, Any]:
        from multiworld.world.manager import WorldManager

        manager = WorldManager()
        store = f"tcp://{self._host}:{port}"
        world = await manager.join("bench", rank=rank, size=2, store=store)
        return manager, world


def run(options: Options, on_step: Callable[[Step], None]) -> None:
    """Create two namespaces, and measure between them."""
    from multiworld.testing.hosts import Hosts

    with Hosts(2, subnet="10.79.0") as hosts:
        arguments = [hosts[0].address, str(options.rounds), str(int(options.is_quick))]
        processes = [
            subprocess.Popen(
                host.command(sys.executable, "-m", __name__, str(rank), *arguments),
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            assert processes[0].stdout is not None
            for line in processes[0].stdout:
                kind, what = json.loads(line)
                on_step((kind, what))
            for process in processes:
                if process.wait(30):
                    raise RuntimeError("a process of the benchmark failed")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def member(rank: int, host: str, rounds: int, *, is_quick: bool) -> None:
    """Measure as one of the two hosts; rank 0 prints its reports as lines of JSON."""
    # ``host``: address of rank 0; ``is_quick``: measure only the largest size.
    torch.set_num_threads(1)
    rivals: dict[str, Any] = {
        "tcp socket": Tcp(rank, (host, 7001)),
        "world, direct": Across(rank, host, 7002),
    }
    sizes = SIZES[-1:] if is_quick else SIZES
    for number in range(rounds):
        for size in sizes:
            _tell(rank, ("step", (number / rounds, f"{size:,} bytes")))
            tensor = torch.zeros(size, dtype=torch.uint8)
            count = max(8, min(5_000, BUDGET_BYTES // size))
            for name in list(rivals) if number % 2 else list(rivals)[::-1]:
                rate, trip = _measure(rank, rivals[name], tensor, count)
                _tell(rank, ("sample", ("stream", size, name, "messages/s", rate)))
                _tell(rank, ("sample", ("round trip", size, name, "us", trip)))
    for rival in rivals.values():
        rival.close()


def _measure(
    rank: int, rival: Any, tensor: torch.Tensor, count: int
) -> tuple[float, float]:
    rival.ping(torch.zeros(1), 10, is_first=rank == 0)
    rate = count / stream(rank, rival, tensor, count)
    trips = max(8, count // 8)
    began = time.perf_counter()
    rival.ping(tensor, trips, is_first=rank == 0)
    return rate, (time.perf_counter() - began) / trips * 1e6


def _tell(rank: int, what: Step) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    member(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), is_quick=sys.argv[4] == "1")
