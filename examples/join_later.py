"""Late join: a worker joins the leader while another world's traffic is measured.

World 1 passes messages all the time. World 2's worker starts after --steps / 100
seconds. The summary shows the time between messages of world 1 before, during and after
the join. With --kill, world 2's worker is killed half way through its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
import sys
import time

import torch

from common import free_port, parse, say, start_worker
from multiworld import MemberLostError, MultiWorldError, World, WorldManager


async def answer(world: World) -> None:
    """Send every message back until the leader leaves; the worker's part."""
    with contextlib.suppress(MultiWorldError):
        while True:
            await world.send(await world.recv(src=0), dst=0)


async def ask(world: World, times: list[float]) -> None:
    """Make round trips and record when each was done; the leader's part."""
    while True:
        await world.send(torch.ones(256), dst=1)
        await world.recv(src=1)
        times.append(time.monotonic())
        await asyncio.sleep(0.001)


async def work(args: argparse.Namespace) -> bool:
    """Run a worker in the worlds of the arguments, one after the other."""
    async with WorldManager() as manager:
        for world_id, rank in (map(int, w.split(":")) for w in args.world):
            world = await manager.join(
                f"world{world_id}",
                rank=rank,
                size=2,
                store=args.store or f"tcp://{args.addr}",
                backend=args.backend,
            )
            await answer(world)
    return True


async def lead(args: argparse.Namespace) -> bool:
    """Run the leader, which is rank 0 of both worlds."""
    if not args.store:
        args.addr = args.addr or f"127.0.0.1:{free_port()}"
    store = args.store or f"tcp://{args.addr}"
    joining = {"rank": 0, "size": 2, "store": store}
    joining["backend"] = args.backend
    times: list[float] = []
    marks: list[float] = []
    phase_s = args.steps / 100
    with start_worker(args, 1, 1):
        async with WorldManager() as manager:
            one = await manager.join("world1", **joining)
            traffic = asyncio.create_task(ask(one, times))
            await asyncio.sleep(phase_s)
            marks.append(time.monotonic())
            with start_worker(args, 2, 1) as late:
                two = await manager.join("world2", **joining)
                say(two, "joined while world1 was busy")
                marks.append(time.monotonic())
                good = await use(two, late if args.kill else None)
                await asyncio.sleep(phase_s)
                good = good and not traffic.done()
                traffic.cancel()
                await manager.close()
    report(times, marks)
    return good


async def use(world: World, victim: object) -> bool:
    """Make 100 round trips in the new world; kill its worker half way, if given."""
    for number in range(100):
        try:
            if victim is not None and number == 50:
                say(world, "killing its worker")
                victim.kill()  # type: ignore[attr-defined]
            await world.send(torch.tensor(number), dst=1)
            await world.recv(src=1)
        except MemberLostError as error:
            say(world, f"stopped at step {number}: {error}")
            return victim is not None
    say(world, "all 100 steps done")
    return victim is None


def report(times: list[float], marks: list[float]) -> None:
    """Print the gaps between world 1's messages before, during and after the join."""
    bounds = [float("-inf"), *marks, float("inf")]
    for name, begin, end in zip(
        ("before", "while joining", "after"), bounds[:-1], bounds[1:], strict=True
    ):
        chosen = [t for t in times if begin <= t < end]
        gaps = [late - early for early, late in itertools.pairwise(chosen)]
        if gaps:
            median, longest = statistics.median(gaps) * 1e3, max(gaps) * 1e3
            print(
                f"world1 {name}: {len(gaps)} messages, "
                f"median gap {median:.2f} ms, longest {longest:.2f} ms"
            )


if __name__ == "__main__":
    arguments = parse(__doc__)
    good = asyncio.run(work(arguments) if arguments.world else lead(arguments))
    sys.exit(0 if good else 1)
