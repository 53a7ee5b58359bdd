"""Operations by a world's name: all of them, on the right world."""

from __future__ import annotations

import asyncio
import copy
import inspect

import pytest
import torch

from multiworld import BrokenWorldException, UnknownWorldError, WorldManager
from multiworld.backends.collectives import CollectiveMethods
from multiworld.testing import Arena
from multiworld.world.blocking_world import BlockingWorld
from multiworld.world.communicator import WorldCommunicator

COLLECTIVES = sorted(
    name
    for name, found in vars(CollectiveMethods).items()
    if inspect.iscoroutinefunction(found) and not name.startswith("_")
)


def test_collectives_are_those_that_are_documented() -> None:
    """Otherwise, the list that the other tests use might be empty by accident."""
    assert COLLECTIVES == [
        "all_gather",
        "all_reduce",
        "all_to_all",
        "barrier",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    ]


@pytest.mark.parametrize("name", COLLECTIVES)
async def test_every_collective_exists_by_name_and_blocking(name: str) -> None:
    """A new collective is offered everywhere at once."""
    async with WorldManager() as manager:
        assert callable(getattr(manager.communicator, name))
    wanted = inspect.signature(getattr(CollectiveMethods, name)).parameters
    found = inspect.signature(getattr(BlockingWorld, name)).parameters
    assert list(found) == [*wanted, "timeout_s"]


@pytest.mark.parametrize("name", ["reform", "_call", "no_such", "__len__"])
async def test_anything_else_is_no_operation(name: str) -> None:
    async with WorldManager() as manager:
        assert not hasattr(manager.communicator, name)


async def test_operations_by_name_do_what_the_world_does() -> None:
    async with Arena("memory") as arena:
        await asyncio.gather(arena.world(2, "a"), arena.world(2, "b"))

        async def member(rank: int) -> None:
            comm = arena.managers[rank].communicator
            mine = torch.tensor([float(rank + 1)])
            other = 1 - rank
            for name in ("a", "b"):
                if rank == 0:
                    await comm.send(mine, other, name)
                else:
                    taken = torch.zeros(1)
                    await comm.recv(taken, other, name)
                    assert taken.item() == 1.0
            shared = mine.clone()
            await comm.broadcast(shared, 1, "a")
            assert shared.item() == 2.0
            total = mine.clone()
            await comm.all_reduce(total, world_name="b")
            assert total.item() == 3.0
            total = mine.clone()
            await comm.reduce(total, 0, world_name="a")
            assert total.item() == (3.0 if rank == 0 else 2.0)
            gathered = [torch.zeros(1) for _ in range(2)]
            await comm.all_gather(gathered, mine, "a")
            assert [t.item() for t in gathered] == [1.0, 2.0]
            into = [torch.zeros(1) for _ in range(2)] if rank == 1 else []
            await comm.gather(mine, into, 1, "a")
            assert [t.item() for t in into] == ([1.0, 2.0] if rank == 1 else [])
            parts = [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None
            await comm.scatter(mine, parts, 0, "a")
            assert mine.item() == 5.0 + rank
            await comm.barrier(world_name="b")
            out = torch.zeros(1)
            halves = [torch.ones(1), torch.ones(1)]
            await comm.reduce_scatter(out, halves, world_name="a")
            assert out.item() == 2.0

        await asyncio.gather(member(0), member(1))


async def test_name_may_be_left_out_while_there_is_one_world() -> None:
    async with Arena("memory") as arena:
        manager = arena.manager(0)
        with pytest.raises(UnknownWorldError, match="0 worlds"):
            await manager.communicator.barrier()
        await arena.world(1, "a")
        await manager.communicator.barrier()
        await arena.world(1, "b")
        with pytest.raises(UnknownWorldError, match="2 worlds"):
            await manager.communicator.barrier()
        with pytest.raises(UnknownWorldError, match="'c'"):
            await manager.communicator.barrier(world_name="c")
        with pytest.raises(UnknownWorldError):
            await manager.communicator.send(torch.ones(1), 0, "c")


async def test_world_is_broken_if_unknown_or_incomplete() -> None:
    """Old programs ask this before every operation."""
    async with Arena("memory") as arena:
        worlds = await arena.world(2, "a")
        comm = arena.manager(0).communicator
        assert comm.is_broken("no such world")
        assert not comm.is_broken("a")
        await worlds[1].close()
        await worlds[0].wait_incomplete()
        assert comm.is_broken("a")


async def test_lost_member_is_pymultiworlds_exception() -> None:
    """Programs for pymultiworld catch that name."""
    async with Arena("memory") as arena:
        await arena.world(2, "a")
        comm = arena.manager(0).communicator
        receiving = asyncio.create_task(comm.recv(torch.zeros(1), 1, "a"))
        await asyncio.sleep(0)
        arena.manager(1).watchdog.close_nowait(politely=False)
        with pytest.raises(BrokenWorldException):
            await receiving
        assert comm.is_broken("a")


def test_communicator_without_attributes_can_be_copied() -> None:
    """Copying and pickling look for private names before there are any attributes."""
    bare = object.__new__(WorldCommunicator)
    assert isinstance(copy.copy(bare), WorldCommunicator)
