"""Checks of leaving, closing and cancelling."""

from __future__ import annotations

import asyncio

import torch
from torch import Tensor

from multiworld.errors import (
    MemberLeftError,
    WorldBrokenError,
    WorldClosedError,
)
from multiworld.testing.arena import Arena
from multiworld.world.world import World
from tests.contract.backends.harness import (
    check,
    every,
    expect,
    raised_by,
    same,
)


@check
async def leaves_politely(arena: Arena) -> None:
    """Check that ``close`` delivers sent messages first, then ``MemberLeftError``."""
    left, right = await arena.world(2)
    sizes = (1, 100, 50_000) if arena.config.host_p2p == "direct" else ()
    sent = [torch.randn(size) for size in sizes]
    receiving = asyncio.ensure_future(_receive_all(right, len(sent)))
    for tensor in sent:
        await left.send(tensor, dst=1)
    pending = asyncio.ensure_future(raised_by(right.recv_object(src=0, tag=9)))
    await left.close()
    assert all(same(a, b) for a, b in zip(await receiving, sent, strict=True))
    for error in (await pending, await raised_by(right.recv_object(src=0))):
        assert isinstance(error, MemberLeftError), error
        assert error.rank == 0
    assert isinstance(
        await raised_by(right.send(torch.ones(1), dst=0)), MemberLeftError
    )
    assert isinstance(await raised_by(right.barrier()), MemberLeftError)
    assert right.is_ready
    assert right.left == {0}
    assert isinstance(
        await raised_by(left.send(torch.ones(1), dst=1)), WorldClosedError
    )


async def _receive_all(world: World, count: int) -> list[Tensor]:
    return [await world.recv(src=0) for _ in range(count)]


@check
async def a_collective_is_complete_though_its_root_has_left(arena: Arena) -> None:
    if arena.config.eager_bytes == 0:
        return  # in the rendezvous mode the root waits for the others
    for _ in range(4):  # several worlds, because either side may dial
        left, right = await arena.world(2)
        if arena.backend == "gloo":  # members compare calls first, so the root waits
            tensor = torch.zeros(3)
            await asyncio.gather(
                left.broadcast(torch.ones(3), src=0), right.broadcast(tensor, src=0)
            )
            await left.close()
        else:
            sending = asyncio.ensure_future(left.broadcast(torch.ones(3), src=0))
            for _ in range(20):
                await asyncio.sleep(0)
            tensor = torch.zeros(3)
            receiving = asyncio.ensure_future(right.broadcast(tensor, src=0))
            await sending
            await left.close()
            await receiving
        assert torch.equal(tensor, torch.ones(3))


@check
async def closing_fails_our_own_sends(arena: Arena) -> None:
    if arena.config.host_p2p == "backend":
        return  # a pending receive is torch's own and cannot be withdrawn
    left, right = await arena.world(2)
    sends = [
        asyncio.ensure_future(raised_by(left.send(torch.ones(8_000_000), dst=1, tag=3)))
        for _ in range(2)
    ]
    waiting = asyncio.ensure_future(raised_by(right.recv(src=0)))
    await asyncio.sleep(0.05)
    arena.manager(0).cleanup()
    for send in sends:
        assert isinstance(await send, WorldClosedError | None)
    assert isinstance(await waiting, MemberLeftError)
    for _ in range(3):
        error = await raised_by(right.recv(src=0, tag=3))
        assert isinstance(error, MemberLeftError | None)


@check
async def the_rest_goes_on_after_a_leave(arena: Arena) -> None:
    """Check that remaining members can still send, while collectives raise errors."""
    worlds = await arena.world(3)
    await every(worlds, lambda w: w.barrier())
    await worlds[2].close()
    one = torch.ones(1)
    await asyncio.gather(worlds[0].send(one, dst=1), expect(worlds[1], one))
    errors = await every(worlds[:2], lambda w: raised_by(w.all_reduce(torch.ones(4))))
    assert all(isinstance(e, MemberLeftError) and e.rank == 2 for e in errors), errors


@check
async def cancelling_a_collective_breaks_the_world_only(arena: Arena) -> None:
    other = await arena.world(2, "other")
    worlds = await arena.world(2, "again")
    pending = asyncio.ensure_future(worlds[0].all_reduce(torch.ones(2)))
    await asyncio.sleep(0.01)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    error = await raised_by(worlds[1].all_reduce(torch.ones(2)))
    assert isinstance(error, WorldBrokenError), error
    assert "cancelled" in str(error)
    await every(other, lambda w: w.all_reduce(torch.ones(2)))
    worlds = await arena.world(2, "again")
    assert worlds[0].epoch == 2
    await every(worlds, lambda w: w.all_reduce(torch.ones(2)))


@check
async def closes_while_operations_wait(arena: Arena) -> None:
    left, _ = await arena.world(2)
    pending = [
        asyncio.ensure_future(raised_by(left.recv(src=1))),
        asyncio.ensure_future(raised_by(left.recv_object(src=1, tag=3))),
        asyncio.ensure_future(raised_by(left.barrier())),
    ]
    await asyncio.sleep(0.01)
    await left.close()
    for step in pending:
        assert isinstance(await step, WorldClosedError)
