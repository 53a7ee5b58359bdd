"""Point-to-point rate and round trip: worlds beside plain torch.distributed.

Two processes on one host. Rounds of all systems take turns, so that a noisy minute hits
all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

SIZES = (4_096, 40_960, 409_600, 4_194_304)
SYSTEMS = ("plain gloo", "world on gloo", "world on direct")
BUDGET_BYTES = 256 * 1024 * 1024
LIMIT_S = 600


def messages_in(size: int) -> int:
    """Return how many messages one round sends."""
    return max(50, min(5_000, BUDGET_BYTES // size))


@dataclass(frozen=True)
class Result:
    """Rates of one system at one size, over all rounds; seconds and messages."""

    system: str
    size_bytes: int
    kind: str
    median: float
    worst: float
    ratio: float


class Plain:
    """torch.distributed's own send and recv."""

    def __init__(self, rank: int, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        self.peer = 1 - rank

    def send_many(self, tensor: torch.Tensor, count: int) -> None:
        """Send the same tensor again and again."""
        for _ in range(count):
            dist.send(tensor, self.peer)

    def recv_many(self, tensor: torch.Tensor, count: int) -> None:
        """Receive as often."""
        for _ in range(count):
            dist.recv(tensor, self.peer)

    def ping(self, tensor: torch.Tensor, count: int, first: bool) -> None:
        """Send to and fro."""
        for _ in range(count):
            if first:
                dist.send(tensor, self.peer)
                dist.recv(tensor, self.peer)
            else:
                dist.recv(tensor, self.peer)
                dist.send(tensor, self.peer)

    def close(self) -> None:
        """End."""
        dist.destroy_process_group()


class Ours:
    """A world; the loop is run for each call."""

    def __init__(self, rank: int, port: int, backend: str) -> None:
        from multiworld import WorldManager

        self.peer = 1 - rank
        self.runner = asyncio.Runner()

        async def join() -> Any:
            manager = WorldManager()
            store = f"tcp://127.0.0.1:{port}"
            world = await manager.join(
                "bench", rank=rank, size=2, store=store, backend=backend
            )
            return manager, world

        self.manager, self.world = self.runner.run(join())

    def send_many(self, tensor: torch.Tensor, count: int) -> None:
        """Send the same tensor again and again."""

        async def run() -> None:
            for _ in range(count):
                await self.world.send(tensor, dst=self.peer)

        self.runner.run(run())

    def recv_many(self, tensor: torch.Tensor, count: int) -> None:
        """Receive as often."""

        async def run() -> None:
            for _ in range(count):
                await self.world.recv(tensor, src=self.peer)

        self.runner.run(run())

    def ping(self, tensor: torch.Tensor, count: int, first: bool) -> None:
        """Send to and fro."""

        async def run() -> None:
            for _ in range(count):
                if first:
                    await self.world.send(tensor, dst=self.peer)
                    await self.world.recv(tensor, src=self.peer)
                else:
                    await self.world.recv(tensor, src=self.peer)
                    await self.world.send(tensor, dst=self.peer)

        self.runner.run(run())

    def close(self) -> None:
        """End."""
        self.runner.run(self.manager.close())
        self.runner.close()


MAKERS: dict[str, Callable[[int, int], Any]] = {
    "plain gloo": Plain,
    "world on gloo": lambda rank, port: Ours(rank, port, "gloo"),
    "world on direct": lambda rank, port: Ours(rank, port, "direct"),
}


def measure(rank: int, ports: list[int], rounds: int, pipe: Connection | None) -> None:
    """Run every round of every system; rank 0 reports seconds for each."""
    torch.set_num_threads(1)
    systems = {s: MAKERS[s](rank, p) for s, p in zip(SYSTEMS, ports, strict=True)}
    report: dict[tuple[str, int, str], list[float]] = {}
    one = torch.zeros(1)
    for _ in range(rounds):
        for size in SIZES:
            tensor = torch.zeros(size, dtype=torch.uint8)
            for name, system in systems.items():
                count = messages_in(size)
                system.ping(one, 20, rank == 0)  # both are there, and warm
                began = time.perf_counter()
                if rank == 0:
                    system.send_many(tensor, count)
                    system.recv_many(one, 1)  # the receiver has everything
                else:
                    system.recv_many(tensor, count)
                    system.send_many(one, 1)
                took = time.perf_counter() - began
                report.setdefault((name, size, "messages/s"), []).append(count / took)
                trips = max(20, count // 10)
                began = time.perf_counter()
                system.ping(tensor, trips, rank == 0)
                took = (time.perf_counter() - began) / trips * 1e6
                report.setdefault((name, size, "round trip us"), []).append(took)
    for system in systems.values():
        system.close()
    if pipe is not None:
        pipe.send(report)


def summarise(report: dict[tuple[str, int, str], list[float]]) -> list[Result]:
    """Return medians, worst rounds and ratios to plain Gloo."""
    results = []
    for (system, size, kind), values in report.items():
        is_rate = kind == "messages/s"
        median = statistics.median(values)
        baseline = statistics.median(report[SYSTEMS[0], size, kind])
        ratio = median / baseline if is_rate else baseline / median
        worst = min(values) if is_rate else max(values)
        results.append(Result(system, size, kind, median, worst, ratio))
    return sorted(results, key=lambda r: (r.kind, r.size_bytes))


def show(results: list[Result]) -> None:
    """Print the tables."""
    console = Console()
    for kind in ("messages/s", "round trip us"):
        table = Table(title=kind)
        for column in ("bytes", "system", "median", "worst round", "times plain gloo"):
            table.add_column(column, justify="right")
        for r in results:
            if r.kind == kind:
                numbers = f"{r.median:,.0f}", f"{r.worst:,.0f}", f"{r.ratio:.2f}"
                table.add_row(f"{r.size_bytes:,}", r.system, *numbers)
        console.print(table)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    ports = free_ports(len(SYSTEMS))
    processes = [
        context.Process(
            target=measure,
            args=(rank, ports, args.rounds, theirs if not rank else None),
        )
        for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    try:
        if not ours.poll(LIMIT_S):
            raise SystemExit("no result in time")
        results = summarise(ours.recv())
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    if args.json:
        where = {"python": platform.python_version(), "torch": torch.__version__}
        print(json.dumps({**where, "results": [asdict(r) for r in results]}, indent=2))
    else:
        show(results)


if __name__ == "__main__":
    main()
