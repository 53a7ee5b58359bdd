"""Suite "fan": one leader in 1 to 8 worlds, each with one worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import torch

from benchmarks.members import Options, Reporter
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

BASELINE = ""
SIZE = 9
WORLDS = (1, 2, 4, 8)
SIZES = (4_096, 409_600)
SECONDS = 1.0
"""Seconds of one measurement."""

Move = Callable[[World, torch.Tensor, int], "asyncio.Future[None]"]


def body(rank: int, options: Options, reporter: Reporter) -> None:
    """Lead as rank 0, or work as another rank in one world with it."""
    asyncio.run(_run(rank, options, reporter))


async def _run(rank: int, options: Options, reporter: Reporter) -> None:
    store = f"tcp://127.0.0.1:{options.ports[0]}"
    async with WorldManager() as manager:
        numbers = range(1, SIZE) if rank == 0 else [rank]
        worlds = await asyncio.gather(
            *(
                manager.join(f"fan{n}", rank=min(rank, 1), size=2, store=store)
                for n in numbers
            )
        )
        if rank == 0:
            await _lead(list(worlds), options, reporter)
        else:
            await _work(worlds[0])


async def _lead(worlds: list[World], options: Options, reporter: Reporter) -> None:
    sizes = SIZES[:1] if options.is_quick else SIZES
    seconds = 0.3 if options.is_quick else SECONDS
    total = options.rounds * len(sizes) * len(WORLDS) * 2
    done = 0
    for _ in range(options.rounds):
        for size in sizes:
            for direction in ("in", "out"):
                for count in WORLDS:
                    reporter.step(done / total, f"fan-{direction}, {count} worlds")
                    done += 1
                    chosen = worlds[:count]
                    counts = await _measure(chosen, size, direction, seconds)
                    name = f"{count} world{'s' if count > 1 else ''}"
                    kind = f"fan-{direction}"
                    rate = sum(counts) / seconds
                    reporter.sample(kind, size, name, "messages/s", rate)
                    fair = min(counts) / max(counts)
                    reporter.sample(
                        f"{kind}, slowest to fastest", size, name, "of 1", fair
                    )
    for world in worlds:
        await world.send_object({"op": "end"}, dst=1)


async def _measure(
    worlds: list[World], size: int, direction: str, seconds: float
) -> list[int]:
    order = {"op": direction, "size": size, "seconds": seconds}
    for world in worlds:
        await world.send_object(order, dst=1)
    if direction == "in":
        return list(await asyncio.gather(*(_receive(w, size) for w in worlds)))
    return list(await asyncio.gather(*(_send(w, size, seconds, 1) for w in worlds)))


async def _work(world: World) -> None:
    while (order := await world.recv_object(src=0))["op"] != "end":
        size, seconds = order["size"], order["seconds"]
        if order["op"] == "in":
            await _send(world, size, seconds, 0)
        else:
            await _receive(world, size)


async def _send(world: World, size: int, seconds: float, peer: int) -> int:
    """Send for ``seconds``, then mark the end; return the number of messages."""
    tensor, count = torch.zeros(size, dtype=torch.uint8), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await world.send(tensor, dst=peer)
        count += 1
    tensor[0] = 1
    await world.send(tensor, dst=peer)
    await world.recv_object(src=peer)
    return count


async def _receive(world: World, size: int) -> int:
    peer = 1 - world.rank
    tensor, count = torch.zeros(size, dtype=torch.uint8), 0
    while True:
        await world.recv(tensor, src=peer)
        if tensor[0]:
            break
        count += 1
    await world.send_object({"received": count}, dst=peer)
    return count
