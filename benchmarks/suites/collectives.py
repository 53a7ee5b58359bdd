"""Suite "collectives": 2, 4 and 8 ranks on one host, beside plain Gloo."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.members import Options, Reporter
from multiworld.world.manager import WorldManager

BASELINE = "plain gloo"
SIZES = (4_096, 65_536, 1_048_576, 4_194_304, 16_777_216)
QUICK = (4_096, 1_048_576)
BUDGET_BYTES = 64 * 1024 * 1024
"""Total bytes that all ranks put into one measurement."""


class PlainCollectives:
    """Collectives of torch.distributed, on Gloo."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self._size = size

    def meet(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def all_reduce(self, tensor: Tensor, count: int) -> None:
        for _ in range(count):
            dist.all_reduce(tensor)

    def broadcast(self, tensor: Tensor, count: int) -> None:
        for _ in range(count):
            dist.broadcast(tensor, 0)

    def all_gather(self, tensor: Tensor, count: int) -> None:
        outs = [torch.empty_like(tensor) for _ in range(self._size)]
        for _ in range(count):
            dist.all_gather(outs, tensor)

    def close(self) -> None:
        dist.destroy_process_group()


class WorldCollectives:
    """Collectives of a world."""

    def __init__(self, rank: int, size: int, port: int, backend: str) -> None:
        self._runner = asyncio.Runner()
        self._size = size

        async def join() -> tuple[WorldManager, Any]:
            manager = WorldManager()
            world = await manager.join(
                "bench",
                rank=rank,
                size=size,
                store=f"tcp://127.0.0.1:{port}",
                backend=backend,
            )
            return manager, world

        self._manager, self._world = self._runner.run(join())

    def _repeat(self, call: Callable[[], Any], count: int) -> None:
        async def run() -> None:
            for _ in range(count):
                await call()

        self._runner.run(run())

    def meet(self) -> None:
        """Wait for all ranks."""
        # Messages that were sent eagerly leave only while the event loop runs, which is
        # during these calls.
        self._runner.run(self._world.barrier())

    def all_reduce(self, tensor: Tensor, count: int) -> None:
        self._repeat(lambda: self._world.all_reduce(tensor), count)

    def broadcast(self, tensor: Tensor, count: int) -> None:
        self._repeat(lambda: self._world.broadcast(tensor, src=0), count)

    def all_gather(self, tensor: Tensor, count: int) -> None:
        outs = [torch.empty_like(tensor) for _ in range(self._size)]
        self._repeat(lambda: self._world.all_gather(tensor, outs), count)

    def close(self) -> None:
        self._runner.run(self._manager.close())
        self._runner.close()


OPERATIONS = ("all_reduce", "broadcast", "all_gather")


def body_of(size: int) -> Callable[[int, Options, Reporter], None]:
    """Return the body for 2, 4 or 8 ranks; it must be importable by name."""
    return {2: body_of_2, 4: body_of_4, 8: body_of_8}[size]


def body_of_2(rank: int, options: Options, reporter: Reporter) -> None:
    _body(rank, 2, options, reporter)


def body_of_4(rank: int, options: Options, reporter: Reporter) -> None:
    _body(rank, 4, options, reporter)


def body_of_8(rank: int, options: Options, reporter: Reporter) -> None:
    _body(rank, 8, options, reporter)


def _body(rank: int, size: int, options: Options, reporter: Reporter) -> None:
    rivals: dict[str, Any] = {
        "plain gloo": PlainCollectives(rank, size, options.ports[0]),
        "world, direct": WorldCollectives(rank, size, options.ports[1], "direct"),
        "world, gloo": WorldCollectives(rank, size, options.ports[2], "gloo"),
    }
    sizes = QUICK if options.is_quick else SIZES[: {2: 5, 4: 4, 8: 3}[size]]
    for number in range(options.rounds):
        for place, bytes_ in enumerate(sizes):
            done = (number * len(sizes) + place) / (options.rounds * len(sizes))
            reporter.step(done, f"{size} ranks, {bytes_:,} bytes")
            tensor = torch.zeros(bytes_ // 4)
            count = max(3, min(200 // size, BUDGET_BYTES // bytes_ // size))
            for operation in OPERATIONS:
                order = list(rivals)[::-1] if number % 2 else list(rivals)
                for name in order:
                    call = getattr(rivals[name], operation)
                    call(tensor, 2)
                    rivals[name].meet()
                    began = time.perf_counter()
                    call(tensor, count)
                    rivals[name].meet()
                    took = (time.perf_counter() - began) / count * 1e6
                    kind = f"{operation}, {size} ranks"
                    reporter.sample(kind, bytes_, name, "us", took)
    for rival in rivals.values():
        rival.close()
