"""Collectives of a native group whose members leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from multiworld import MemberLeftError, WorldConfig
from multiworld.backends.c10d import work_runner
from multiworld.backends.c10d.work_runner import WorkRunner
from multiworld.testing import Arena
from tests.until import until


async def test_collective_outlasts_a_member_that_completed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others may take long: they pass large tensors on without the root."""
    monkeypatch.setattr(work_runner, "LEFT_GRACE_S", 0.0)
    may_start = asyncio.Event()
    carry_out = WorkRunner.carry_out

    async def wait_and_carry_out(self: WorkRunner, number: int, start: Any) -> None:
        if asyncio.current_task() is calls[-1]:
            await may_start.wait()
        await carry_out(self, number, start)

    async with Arena("gloo", WorldConfig(join_s=20)) as arena:
        worlds = await arena.world(4)
        monkeypatch.setattr(WorkRunner, "carry_out", wait_and_carry_out)
        got = [torch.full((4,), float(world.rank == 0)) for world in worlds]
        calls = [
            asyncio.create_task(world.broadcast(tensor, src=0))
            for world, tensor in zip(worlds, got, strict=True)
        ]
        await calls[0]  # it sends to others than the last one, which pass it on
        await worlds[0].close()
        await until(lambda: all(world.left == {0} for world in worlds[1:]))
        await asyncio.sleep(0.01)  # nothing happens, so there is no event
        may_start.set()
        await asyncio.gather(*calls)
        assert all(torch.equal(tensor, torch.ones(4)) for tensor in got)


async def test_collective_that_a_member_leaves_within_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members that are not neighbours of the one that left would wait for ever."""
    monkeypatch.setattr(work_runner, "LEFT_GRACE_S", 0.1)
    has_agreed = asyncio.Event()
    carry_out = WorkRunner.carry_out

    async def stay_before_the_start(self: WorkRunner, number: int, start: Any) -> None:
        if asyncio.current_task() is calls[-1]:
            has_agreed.set()
            await asyncio.sleep(60)
        await carry_out(self, number, start)

    async with Arena("gloo", WorldConfig(join_s=20, operation_s=60)) as arena:
        worlds = await arena.world(6)
        monkeypatch.setattr(WorkRunner, "carry_out", stay_before_the_start)
        calls = [asyncio.create_task(w.all_reduce(torch.ones(4))) for w in worlds]
        await has_agreed.wait()
        await asyncio.sleep(0.05)  # the others start meanwhile
        await worlds[-1].close()
        async with asyncio.timeout(15):
            results = await asyncio.gather(*calls[:-1], return_exceptions=True)
        assert [type(r) for r in results] == [MemberLeftError] * 5, results
        assert all(r.rank == 5 for r in results if isinstance(r, MemberLeftError))
        calls[-1].cancel()
        await asyncio.gather(calls[-1], return_exceptions=True)


async def test_member_that_completed_it_does_not_wait_in_the_next_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 has all it needs; rank 0 fails within it, and never calls again."""
    monkeypatch.setattr(work_runner, "LEFT_GRACE_S", 0.1)
    carry_out = WorkRunner.carry_out
    has_agreed = asyncio.Event()

    async def each_its_own(self: WorkRunner, number: int, start: Any) -> None:
        task = asyncio.current_task()
        if task is calls[1]:
            return
        if task is calls[2]:
            has_agreed.set()
            await asyncio.sleep(60)
        await carry_out(self, number, start)

    async with Arena("gloo", WorldConfig(join_s=20, operation_s=60)) as arena:
        worlds = await arena.world(3)
        monkeypatch.setattr(WorkRunner, "carry_out", each_its_own)
        calls = [asyncio.create_task(w.all_reduce(torch.ones(4))) for w in worlds]
        await asyncio.gather(calls[1], has_agreed.wait())
        following = asyncio.create_task(worlds[1].all_reduce(torch.ones(4)))
        await worlds[2].close()
        async with asyncio.timeout(15):
            results = await asyncio.gather(calls[0], following, return_exceptions=True)
        assert [type(r) for r in results] == [MemberLeftError] * 2, results
        calls[2].cancel()
        await asyncio.gather(calls[2], return_exceptions=True)
