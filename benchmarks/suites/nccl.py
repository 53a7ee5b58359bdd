"""Suite "nccl": worlds on GPUs, beside plain ``torch.distributed`` on NCCL.

With one GPU, both ranks share it. Each pretends to be on a host of its own, because
NCCL rejects two ranks of one host on one GPU; so NCCL uses its socket transport. The
suite shows the cost that worlds add to NCCL, not the speed of a GPU's links. Every
measurement ends with a synchronisation of the device.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import members
from benchmarks.contenders import unwatch, wake
from benchmarks.members import Options, Reporter, Step
from multiworld.world.manager import WorldManager

PLAIN, OURS, UNWATCHED = "plain nccl", "world, nccl", "unwatched"
BASELINE = PLAIN
SIZE = 2
SIZES = (4_096, 409_600, 4_194_304, 67_108_864)
QUICK = (4_096, 4_194_304)
BUDGET_BYTES = 512 * 1024 * 1024
"""Bytes of one measurement."""

MAX_MESSAGES, MIN_MESSAGES = 500, 6
"""Maximum and minimum number of messages of one measurement."""


class PlainNccl:
    """Operations of torch.distributed on a backend."""

    def __init__(
        self, rank: int, port: int, backend: str, device: torch.device
    ) -> None:
        store = dist.TCPStore("127.0.0.1", port, SIZE, rank == 0)
        dist.init_process_group(backend, store=store, rank=rank, world_size=SIZE)
        self._peer = 1 - rank

    def stream(self, tensor: Tensor, count: int, *, is_sender: bool) -> None:
        move = dist.send if is_sender else dist.recv
        for _ in range(count):
            move(tensor, self._peer)

    def all_reduce(self, tensor: Tensor, count: int) -> None:
        for _ in range(count):
            dist.all_reduce(tensor)

    def close(self) -> None:
        dist.destroy_process_group()


class WorldOnGpu:
    """A world on a backend, with heartbeats or without."""

    def __init__(
        self,
        rank: int,
        port: int,
        backend: str,
        device: torch.device,
        *,
        is_watched: bool = True,
    ) -> None:
        self._peer = 1 - rank
        self._runner = asyncio.Runner()
        self._manager, self._world = self._runner.run(
            self._join(rank, port, backend, device)
        )
        if not is_watched:
            self._runner.run(unwatch(self._manager))

    async def _join(
        self, rank: int, port: int, backend: str, device: torch.device
    ) -> tuple[WorldManager, Any]:
        manager = WorldManager()
        world = await manager.join(
            "bench",
            rank=rank,
            size=SIZE,
            store=f"tcp://127.0.0.1:{port}",
            backend=backend,
            device=device,
        )
        return manager, world

    def stream(self, tensor: Tensor, count: int, *, is_sender: bool) -> None:
        async def run() -> None:
            for _ in range(count):
                if is_sender:
                    await self._world.send(tensor, dst=self._peer)
                else:
                    await self._world.recv(tensor, src=self._peer)

        self._runner.run(run())

    def all_reduce(self, tensor: Tensor, count: int) -> None:
        async def run() -> None:
            for _ in range(count):
                await self._world.all_reduce(tensor)

        self._runner.run(run())

    def close(self) -> None:
        wake(self._manager)
        self._runner.run(self._manager.close())
        self._runner.close()


def run(options: Options, on_step: Callable[[Step], None]) -> None:
    """Measure on the GPUs of this machine."""
    if not torch.cuda.is_available():
        raise RuntimeError("this machine has no GPU; run another suite")
    members.run(on_gpus, SIZE, options, on_step)


def on_gpus(rank: int, options: Options, reporter: Reporter) -> None:
    """Measure on NCCL, with a GPU for each rank if there are enough."""
    count = torch.cuda.device_count()
    if count < SIZE:
        os.environ["NCCL_HOSTID"] = f"multiworld-bench-{rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        reporter.note("both ranks share one GPU: NCCL takes its socket transport")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    measure(rank, options, reporter, "nccl", device)


def on_hosts(rank: int, options: Options, reporter: Reporter) -> None:
    """Measure on Gloo without a GPU, to test the suite."""
    measure(rank, options, reporter, "gloo", torch.device("cpu"))


def measure(
    rank: int, options: Options, reporter: Reporter, backend: str, device: torch.device
) -> None:
    """Measure all contenders alternately, at each size."""
    ports = iter(options.ports)
    rivals: dict[str, PlainNccl | WorldOnGpu] = {
        PLAIN: PlainNccl(rank, next(ports), backend, device),
        OURS: WorldOnGpu(rank, next(ports), backend, device),
        UNWATCHED: WorldOnGpu(rank, next(ports), backend, device, is_watched=False),
    }
    sizes = QUICK if options.is_quick else SIZES
    for number in range(options.rounds):
        for size in sizes:
            reporter.step(number / options.rounds, f"{size:,} bytes")
            tensor = torch.zeros(size // 4, device=device)
            for name in list(rivals)[::-1] if number % 2 else rivals:
                _one(rank, name, rivals[name], tensor, reporter)
    for rival in rivals.values():
        rival.close()


def _one(
    rank: int,
    name: str,
    rival: PlainNccl | WorldOnGpu,
    tensor: Tensor,
    reporter: Reporter,
) -> None:
    size = tensor.nbytes
    count = max(MIN_MESSAGES, min(MAX_MESSAGES, BUDGET_BYTES // size))
    one = torch.zeros(1, device=tensor.device)

    def timed(step: Callable[[], None]) -> float:
        rival.all_reduce(one, 3)
        _settle(tensor.device)
        began = time.perf_counter()
        step()
        rival.all_reduce(one, 1)
        _settle(tensor.device)
        return time.perf_counter() - began

    took = timed(lambda: rival.stream(tensor, count, is_sender=rank == 0))
    reporter.sample("stream", size, name, "messages/s", count / took)
    took = timed(lambda: rival.all_reduce(tensor, count))
    reporter.sample("all_reduce", size, name, "us", took / count * 1e6)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
