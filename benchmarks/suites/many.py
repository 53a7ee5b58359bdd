"""Suite "many": cost of a world, and of idle worlds to a busy one."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.members import Options, Reporter, cpu_s
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

BASELINE = ""
SIZE = 2
COUNTS = (1, 10, 100, 1_000)
QUICK = (1, 20)
IDLE_S = 5.0
"""Seconds over which an idle process is measured."""

MESSAGE_BYTES = 4_096
MESSAGES = 4_000
AT_A_TIME = 16
"""Maximum number of worlds that join at once."""


def body(rank: int, options: Options, reporter: Reporter) -> None:
    """Join more and more worlds of two members, and measure at each of ``COUNTS``."""
    asyncio.run(_run(rank, options, reporter))


async def _run(rank: int, options: Options, reporter: Reporter) -> None:
    store = f"tcp://127.0.0.1:{options.ports[0]}"
    async with WorldManager() as manager:
        busy = await manager.join("busy", rank=rank, size=2, store=store)
        counts = QUICK if options.is_quick else COUNTS
        worlds: list[World] = []
        await _rate(busy, 500)
        for place, count in enumerate(counts):
            reporter.step(place / len(counts), f"{count} worlds")
            before = _holdings()
            began = time.perf_counter()
            fresh = range(len(worlds), count)
            worlds += await _join(manager, rank, store, fresh)
            took = time.perf_counter() - began
            after = _holdings()
            made = max(1, len(fresh))
            _tell(reporter, count, made, took, before, after)
            for _ in range(options.rounds):
                rate = await _rate(busy, 300 if options.is_quick else MESSAGES)
                reporter.sample("a busy world", count, "beside", "messages/s", rate)
            await _idle(busy, count, reporter, 1.0 if options.is_quick else IDLE_S)
        reporter.step(1.0, "closing")
        await busy.barrier()


async def _join(
    manager: WorldManager, rank: int, store: str, numbers: Sequence[int]
) -> list[World]:
    """Join worlds, ``AT_A_TIME`` at once, as a leader of many workers would."""
    room = asyncio.Semaphore(AT_A_TIME)

    async def one(number: int) -> World:
        async with room:
            return await manager.join(f"w{number}", rank=rank, size=2, store=store)

    return list(await asyncio.gather(*(one(number) for number in numbers)))


def _holdings() -> tuple[int, int, int]:
    """Return resident bytes, threads and file descriptors of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/proc/self/fd"))
    return pages * os.sysconf("SC_PAGE_SIZE"), threading.active_count(), files


def _tell(
    reporter: Reporter,
    count: int,
    made: int,
    took: float,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
) -> None:
    grown = [(b - a) / made for a, b in zip(before, after, strict=True)]
    reporter.sample("one more world", count, "to create", "ms", took / made * 1e3)
    reporter.sample("one more world", count, "memory", "KiB", grown[0] / 1024)
    reporter.sample("one more world", count, "threads", "of them", grown[1])
    reporter.sample("one more world", count, "descriptors", "of them", grown[2])


async def _rate(world: World, messages: int) -> float:
    tensor, one = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), torch.zeros(1)
    await world.barrier()
    began = time.perf_counter()
    if world.rank == 0:
        for _ in range(messages):
            await world.send(tensor, dst=1)
        await world.recv(one, src=1)
    else:
        for _ in range(messages):
            await world.recv(tensor, src=0)
        await world.send(one, dst=0)
    return messages / (time.perf_counter() - began)


async def _idle(world: World, count: int, reporter: Reporter, seconds: float) -> None:
    """Measure the CPU use of this process, without its helper, while it is idle."""
    await world.barrier()
    before = cpu_s()
    await asyncio.sleep(seconds)
    share = (cpu_s() - before) / seconds * 100
    reporter.sample("all idle", count, "processor", "% of a core", share)
    await world.barrier()
