"""Suite "joining": rate and gaps of a busy world while other worlds join and leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import torch

from benchmarks.members import Options, Reporter
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

BASELINE = "nothing else"
SIZE = 2
MESSAGE_BYTES = 40_960
SECONDS = 3.0
"""Seconds of one measurement."""

EVERY_S = 0.3
"""Seconds between the joins that disturb the busy world."""

DISTURBANCES = ("nothing else", "join and leave", "join and break")

VISITOR = """
import asyncio, sys
from multiworld import WorldManager
async def main():
    async with WorldManager() as manager:
        for line in sys.stdin:
            name, store = line.split()
            world = await manager.join(name, rank=1, size=2, store=store)
            await world.wait_incomplete()
            await manager.leave(name)
print("ready", flush=True)
asyncio.run(main())
"""
"""Program that joins the worlds named on its input, one after the other.

It prints "ready" when everything is imported, so that its start disturbs nothing.
"""


def body(rank: int, options: Options, reporter: Reporter) -> None:
    """Send without pause and join other worlds as rank 0, or receive as rank 1."""
    asyncio.run(_run(rank, options, reporter))


async def _run(rank: int, options: Options, reporter: Reporter) -> None:
    store = f"tcp://127.0.0.1:{options.ports[0]}"
    async with WorldManager() as manager:
        busy = await manager.join("busy", rank=rank, size=2, store=store)
        seconds = 1.0 if options.is_quick else SECONDS
        total = options.rounds * len(DISTURBANCES)
        for number in range(total):
            what = DISTURBANCES[number % len(DISTURBANCES)]
            reporter.step(number / total, what)
            await busy.barrier()
            if rank == 1:
                await _receive(busy)
                continue
            visitors = _Visitors(manager, store, number, what)
            await asyncio.to_thread(visitors.prepare, seconds)
            disturbing = asyncio.ensure_future(visitors.run(seconds))
            await _send(busy, seconds, what, reporter)
            await disturbing
            visitors.close()
            reporter.sample("happened", 0, what, "times", visitors.count)


class _Visitors:
    """Members of other worlds that join, leave and break, each a process."""

    def __init__(
        self, manager: WorldManager, store: str, number: int, what: str
    ) -> None:
        self._manager, self._store = manager, store
        self._number, self._what = number, what
        self._processes: list[subprocess.Popen[str]] = []
        self.count = 0

    def prepare(self, seconds: float) -> None:
        """Start the processes: one for each world to break, or one for all worlds."""
        count = {"join and leave": 1, "join and break": int(seconds / EVERY_S)}
        for _ in range(count.get(self._what, 0)):
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", VISITOR],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    async def run(self, seconds: float) -> None:
        """Join a world every ``EVERY_S``, and leave or break it."""
        # If this is cancelled, a world may stay joined.
        end = time.monotonic() + seconds - EVERY_S
        while self._processes and time.monotonic() < end:
            await asyncio.sleep(EVERY_S / 2)
            name = f"visit-{self._number}-{self.count}"
            visitor = self._processes[0]
            assert visitor.stdin is not None
            print(name, self._store, file=visitor.stdin, flush=True)
            world = await self._manager.join(name, rank=0, size=2, store=self._store)
            await asyncio.sleep(EVERY_S / 2)
            if self._what == "join and break":
                os.kill(self._processes.pop(0).pid, signal.SIGKILL)
                await world.wait_over()
            await self._manager.leave(name)
            self.count += 1

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


async def _send(world: World, seconds: float, what: str, reporter: Reporter) -> None:
    tensor = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    gaps: list[float] = []
    began = last = time.perf_counter()
    while last - began < seconds:
        await world.send(tensor, dst=1)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    tensor[0] = 1
    await world.send(tensor, dst=1)
    gaps.sort()
    rate = len(gaps) / (last - began)
    reporter.sample("stream", MESSAGE_BYTES, what, "messages/s", rate)
    p999 = gaps[int(len(gaps) * 0.999)] * 1e3
    reporter.sample("gap, p99.9", MESSAGE_BYTES, what, "ms", p999)
    reporter.sample("gap, longest", MESSAGE_BYTES, what, "ms", gaps[-1] * 1e3)


async def _receive(world: World) -> None:
    tensor = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
    tensor[0] = 0
    while not tensor[0]:
        await world.recv(tensor, src=0)
