"""Replicas of several ranks: batches that all compute, and ranks that fail or leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from multiworld.errors import ModelFailedError, WorldBrokenError
from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.replica.batches.executor import Executor, Outcome
from multiworld.serve.replica.batches.rank_group import LEADER, RankGroup, follow
from multiworld.serve.spec.stage import Group, Stage, StageContext, Tensors
from multiworld.testing import Arena
from multiworld.world.world import World
from tests.unit.serve.edges import HANG_S, break_world, settle, until

Compute = Callable[[Group, Tensors], Tensors]


class Ranks:
    """The ranks of a replica in one process, each with a thread for its model."""

    def __init__(self, worlds: list[World], compute: Compute) -> None:
        self.worlds, self._compute = worlds, compute
        self.executors = [Executor(Stage(load=self._load), "s", 1) for _ in self.worlds]
        self.followers: list[asyncio.Task[None]] = []
        self.threads: list[threading.Thread] = []

    def _load(self, context: StageContext) -> Any:
        group = context.group
        assert group is not None
        self.threads.append(threading.current_thread())
        return lambda tensors: self._compute(group, tensors)

    async def start(self) -> None:
        for world, executor in zip(self.worlds[1:], self.executors[1:], strict=True):
            following = follow(world, executor, "cpu")
            self.followers.append(asyncio.ensure_future(following))
        group = RankGroup(self.worlds[LEADER])
        await self.executors[LEADER].load(StageContext(group=group))

    async def run(self, *values: float) -> list[Outcome]:
        works = [
            Work(("g", n, 1), None, 1, 1e9, 0.0, content={"x": torch.tensor([value])})
            for n, value in enumerate(values)
        ]
        async with asyncio.timeout(HANG_S):
            return await self.executors[LEADER].run(works)

    async def close(self) -> None:
        for world in self.worlds:
            await world.close()
        for task in self.followers:
            task.cancel()
        await asyncio.gather(*self.followers, return_exceptions=True)
        for executor in self.executors:
            executor.close()
        for thread in self.threads:
            await asyncio.to_thread(thread.join, HANG_S)


@asynccontextmanager
async def ranks(size: int, compute: Compute) -> AsyncIterator[Ranks]:
    async with Arena("memory") as arena:
        made = Ranks(await arena.world(size), compute)
        try:
            await made.start()
            yield made
        finally:
            await made.close()


def values(outcomes: list[Outcome]) -> list[Any]:
    return [
        type(one) if isinstance(one, Exception) else one["y"].item() for one in outcomes
    ]


def sums(group: Group, tensors: Tensors) -> Tensors:
    return {"y": group.all_reduce(tensors["x"] * (group.rank + 1))}


async def test_every_rank_computes_its_part_of_the_leaders_batch() -> None:
    async with ranks(3, sums) as r:
        assert values(await r.run(1.0, 2.0)) == [6.0, 12.0]
        assert values(await r.run(10.0)) == [60.0]


async def test_parts_are_gathered_in_the_order_of_ranks() -> None:
    seen: dict[int, list[float]] = {}

    def gathers(group: Group, tensors: Tensors) -> Tensors:
        parts = group.all_gather(tensors["x"] + group.rank)
        seen[group.rank] = [part.item() for part in parts]
        return {"y": parts[-1]}

    async with ranks(2, gathers) as r:
        assert values(await r.run(5.0)) == [6.0]
        await until(lambda: len(seen) == 2)  # the follower ends by itself
        assert seen == {0: [5.0, 6.0], 1: [5.0, 6.0]}


async def test_request_that_every_rank_refuses_fails_alone() -> None:
    def refuses(group: Group, tensors: Tensors) -> Tensors:
        if 13.0 in tensors["x"]:
            raise ValueError("13")
        return sums(group, tensors)

    async with ranks(2, refuses) as r:
        assert values(await r.run(1.0, 13.0, 2.0)) == [3.0, ModelFailedError, 6.0]
        assert values(await r.run(1.0)) == [3.0]


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("before", [0, 1])
async def test_rank_that_fails_alone_breaks_the_replica(
    failing: int, before: int
) -> None:
    """A rank without GPU memory, for example, never begins its next collective."""

    def fails(group: Group, tensors: Tensors) -> Tensors:
        for _ in range(before):
            group.all_reduce(torch.ones(1))
        if group.rank == failing:
            raise MemoryError("as asked")
        return sums(group, tensors)

    async with ranks(3, fails) as r:
        with pytest.raises(WorldBrokenError):
            await r.run(1.0, 2.0)
        with pytest.raises(WorldBrokenError):
            await r.run(100.0)
        for follower in r.followers:
            with pytest.raises(WorldBrokenError):
                await asyncio.wait_for(follower, HANG_S)


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_rank_that_fails_after_its_last_collective_stays_in_step(
    failing: int,
) -> None:
    """All ranks have begun equally many collectives, so the replica continues."""
    calls = dict.fromkeys(range(3), 0)

    def fails_once(group: Group, tensors: Tensors) -> Tensors:
        outputs = sums(group, tensors)
        calls[group.rank] += 1
        if group.rank == failing and calls[group.rank] == 1:
            raise MemoryError("as asked")
        return outputs

    async with ranks(3, fails_once) as r:
        first = values(await r.run(1.0))
        assert first == [ModelFailedError if failing == LEADER else 6.0]
        assert values(await r.run(100.0)) == [600.0]
        assert values(await r.run(1.0, 2.0)) == [6.0, 12.0]


async def test_follower_returns_when_the_leader_leaves() -> None:
    """The replica has finished, which is no error."""
    async with ranks(2, sums) as r:
        await r.run(1.0)
        await r.worlds[LEADER].close()
        await asyncio.wait_for(r.followers[0], HANG_S)


async def test_lost_rank_ends_followers_with_an_error() -> None:
    """The error makes a follower's process exit, and with it the replica."""
    async with ranks(3, sums) as r:
        await break_world(r.worlds[1])
        for follower in r.followers:
            with pytest.raises(WorldBrokenError):
                await asyncio.wait_for(follower, HANG_S)


async def test_lost_rank_frees_the_model_that_waits_for_it() -> None:
    async with ranks(2, sums) as r:
        r.followers[0].cancel()
        await asyncio.gather(*r.followers, return_exceptions=True)
        running = asyncio.ensure_future(r.run(1.0))
        await settle()
        other = asyncio.ensure_future(r.worlds[1].barrier())
        await settle()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        with pytest.raises(WorldBrokenError):  # the replica exits; others replay
            await running


FORKING = textwrap.dedent(
    """
    import os, sys, time
    from multiworld.serve.replica.batches.rank_group import fork_ranks
    rank = fork_ranks(3)
    os.write(1, f"{rank} {os.getpid()}\\n".encode())
    if len(sys.argv) > 1:
        time.sleep(60)
    """
)


def test_ranks_are_forked_once_each_and_die_with_their_leader() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING, "stay"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as lines:
        said = [next(lines).split() for _ in range(3)]
        pids = {int(rank): int(pid) for rank, pid in said}
        assert pids.keys() == {0, 1, 2}
        assert pids[LEADER] == process.pid
        os.kill(process.pid, signal.SIGKILL)
        assert lines.read() == b""  # all have closed it: none is left
    process.wait()
