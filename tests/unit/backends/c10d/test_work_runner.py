"""Collectives of a native group whose members leave."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
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
    """However long the others take: large weights are passed on without their root."""
    monkeypatch.setattr(work_runner, "LEFT_GRACE_S", 0.0)
    may_start = asyncio.Event()
    carry_out = WorkRunner.carry_out

    async def wait_and_carry_out(self: WorkRunner, start: Any) -> None:
        if asyncio.current_task() is calls[-1]:
            await may_start.wait()
        await carry_out(self, start)

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
    """Members that are no neighbours of the one that left would wait for ever."""
    monkeypatch.setattr(work_runner, "LEFT_GRACE_S", 0.0)
    started: list[asyncio.Future[None]] = []

    async def never_completes(self: WorkRunner, start: Any) -> None:
        def start_nothing(group: Any) -> Any:
            started.append(asyncio.get_running_loop().create_future())
            return SimpleNamespace(get_future=torch.futures.Future)

        await carry_out(self, start_nothing)

    carry_out = WorkRunner.carry_out
    async with Arena("gloo", WorldConfig(join_s=20)) as arena:
        worlds = await arena.world(3)
        monkeypatch.setattr(WorkRunner, "carry_out", never_completes)
        calls = [asyncio.create_task(w.all_reduce(torch.ones(4))) for w in worlds]
        await until(lambda: len(started) == 3)
        await worlds[2].close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(r) for r in results[:2]] == [MemberLeftError] * 2, results
        assert [r.rank for r in results[:2] if isinstance(r, MemberLeftError)] == [2, 2]
