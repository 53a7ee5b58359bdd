"""Tensors made in inference mode, which torch lets nothing write outside of it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from multiworld import WorldBrokenError
from multiworld.backends.lane_collectives import LaneCollectives
from multiworld.testing import Arena

SIZES = (10, 1 << 18, 3 << 20)
"""Elements of tensors sent through the socket, through shared memory, in a thread."""


def made(size: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(size)


@pytest.mark.parametrize("size", SIZES)
async def test_collectives_write_inference_tensors(size: int) -> None:
    async with asyncio.timeout(60), Arena("direct") as arena:
        worlds = await arena.world(3)
        tensors = [made(size) for _ in worlds]
        await asyncio.gather(
            *(w.all_reduce(t) for w, t in zip(worlds, tensors, strict=True))
        )
        assert all(bool((t == 3).all()) for t in tensors)
        columns = [made(4 * size).view(-1, 4)[:, 1] for _ in worlds]
        await asyncio.gather(
            *(w.broadcast(t, src=0) for w, t in zip(worlds, columns, strict=True))
        )
        outs = [made(size) for _ in worlds]
        await asyncio.gather(
            worlds[0].gather(tensors[0], outs=outs, dst=0),
            *(w.gather(tensors[w.rank], dst=0) for w in worlds[1:]),
        )
        assert all(bool((t == 3).all()) for t in outs)


@pytest.mark.parametrize("size", SIZES)
async def test_receives_write_inference_tensors(size: int) -> None:
    async with asyncio.timeout(60), Arena("direct") as arena:
        left, right = await arena.world(2)
        for out in (made(size), made(2 * size)[::2]):
            sending = asyncio.ensure_future(left.send(torch.full((size,), 7.0), dst=1))
            await right.recv(src=0, out=out)
            await sending
            assert bool((out == 7).all())


async def test_receive_whose_copy_fails_leaves_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asyncio.timeout(60), Arena("direct") as arena:
        left, right = await arena.world(2)
        await left.send(torch.ones(3), dst=1)
        with monkeypatch.context() as patch:
            patch.setattr("multiworld.backends.dtypes.overwrite", _fail)
            with pytest.raises(MemoryError):
                await right.recv(src=0, out=torch.zeros(6)[::2])
        assert (await right.recv(src=0)).tolist() == [1.0, 1.0, 1.0]


async def test_collective_that_fails_in_one_member_ends_the_world(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the others would wait for it as long as it lives."""

    async def fail(*_: object) -> None:
        _fail()

    async with asyncio.timeout(60), Arena("direct") as arena:
        left, right = await arena.world(2)
        waiting = asyncio.ensure_future(right.all_reduce(torch.ones(1)))
        with monkeypatch.context() as patch:
            patch.setattr(LaneCollectives, "binomial_down", fail)
            with pytest.raises(MemoryError):
                await left.broadcast(torch.ones(1), src=0)
        with pytest.raises(WorldBrokenError, match="rank 0 failed in"):
            await waiting


def _fail(*_: object) -> None:
    raise MemoryError("no memory")
