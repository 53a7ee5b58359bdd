"""Declarations of collectives: codes on the wire, and one that no group knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from multiworld import TensorMismatchError, World, WorldBrokenError
from multiworld.backends import collectives
from multiworld.backends.collective import (
    _BY_CODE,
    Call,
    Collective,
    Operation,
    Steps,
    declare,
    name_of,
)
from multiworld.backends.dtypes import CODES
from multiworld.backends.lane_collectives import LaneCollectives
from multiworld.testing import Arena
from multiworld.world import joining
from tests.unit.waiting import turns

CODE = 200


def RING(lanes: LaneCollectives, call: Call) -> Steps:
    if call.tensor.numel() == 0:
        raise TensorMismatchError("nothing to pass on")

    async def steps(operation: Operation) -> None:
        dst, src = (lanes.rank + 1) % lanes.size, (lanes.rank - 1) % lanes.size
        arrived = torch.empty_like(call.tensor)
        await lanes.exchange(operation, dst, call.tensor, src, arrived)
        call.tensor.copy_(arrived)

    return steps


@pytest.fixture
def ring() -> Iterator[Collective]:
    with mock.patch.object(joining, "World", Ringed):
        yield declare(CODE)(RING)
    del _BY_CODE[CODE]


class Ringed(World):
    """A world with one more collective, which is added as those of the library are."""

    async def ring(self, call: Call) -> None:
        await self._call(call)


async def pass_on(world: World, call: Call) -> None:
    assert isinstance(world, Ringed)
    await world.ring(call)


async def each(worlds: list[World], make: Any) -> list[Any]:
    """Run a step of every rank at once; return the results or errors."""
    return await asyncio.gather(*(make(w) for w in worlds), return_exceptions=True)


@pytest.mark.parametrize(
    ("name", "code", "has_root"),
    [
        ("broadcast", 0, True),
        ("all_reduce", 1, False),
        ("reduce", 2, True),
        ("all_gather", 3, False),
        ("gather", 4, True),
        ("scatter", 5, True),
        ("reduce_scatter", 6, False),
        ("all_to_all", 7, False),
        ("barrier", 8, False),
    ],
)
def test_codes_on_the_wire_never_change(name: str, code: int, has_root: bool) -> None:
    """A code must mean the same to members of two releases."""
    declared = getattr(collectives, name.upper())
    assert (declared.name, declared.code, declared.has_root) == (name, code, has_root)
    assert name_of(code) == name


def test_every_declaration_is_pinned_above() -> None:
    """A new collective gets a new code, and its line in the table."""
    assert sorted(_BY_CODE) == list(range(9))


def test_code_is_given_once(ring: Collective) -> None:
    """Two collectives with one code could not be distinguished."""
    assert (ring.name, ring.code) == ("ring", CODE)
    with pytest.raises(AssertionError, match="200"):
        declare(CODE)(RING)


def test_operation_names_what_people_need() -> None:
    """The error of members that disagree shows the operations of both sides."""
    code = CODES[torch.float32]
    broadcast = Operation(3, 0, code, 5, 2, 0)
    assert str(broadcast) == "broadcast #3 of 5 float32, root 2"
    assert str(Operation(4, 1, code, 5, 0, 1)) == "all_reduce #4 of 5 float32, SUM"
    unknown = str(Operation(1, 99, 250, 7, 4, 77))
    assert unknown == "collective 99 #1 of 7 250, root 4, 77"


def test_label_holds_code_op_and_root_apart() -> None:
    """The largest values that the wire has room for do not overlap."""
    label = Operation(1, 255, 0, 0, 65_535, 255).label()
    assert label == 0xFFFF_FFFF
    assert Operation(1, 7, 0, 0, 3, 2).label() == 7 << 24 | 2 << 16 | 3


@pytest.mark.parametrize("backend", ["memory", "direct", "gloo"])
async def test_new_collective_runs_on_every_backend(
    backend: str, ring: Collective
) -> None:
    """A native group that does not know it leaves it to the lanes."""
    async with Arena(backend) as arena:
        worlds = await arena.world(3)
        tensors = [torch.full((4,), float(rank)) for rank in range(3)]

        async def member(world: World) -> None:
            await pass_on(world, Call(ring, tensors[world.rank]))
            await world.all_reduce(torch.ones(1))
            await pass_on(world, Call(ring, tensors[world.rank]))

        assert await each(worlds, member) == [None] * 3
        assert [int(t[0]) for t in tensors] == [1, 2, 0]


@pytest.mark.parametrize("backend", ["memory", "gloo"])
async def test_new_collective_checks_its_tensors_before_it_is_numbered(
    backend: str, ring: Collective
) -> None:
    """A wrong call does not harm its world."""
    async with Arena(backend) as arena:
        worlds = await arena.world(2)
        with pytest.raises(TensorMismatchError, match="nothing to pass"):
            await pass_on(worlds[0], Call(ring, torch.empty(0)))
        tensors = [torch.full((1,), float(rank)) for rank in range(2)]
        found = await each(worlds, lambda w: pass_on(w, Call(ring, tensors[w.rank])))
        assert found == [None, None]
        assert [t.item() for t in tensors] == [1.0, 0.0]


async def test_members_that_call_different_collectives_break_the_world(
    ring: Collective,
) -> None:
    async with Arena("memory") as arena:
        worlds = await arena.world(2)

        async def member(world: World) -> None:
            if world.rank:
                await world.barrier()
            else:
                await pass_on(world, Call(ring, torch.ones(1)))

        found = await each(worlds, member)
        text = " ".join(map(str, found))
        assert all(isinstance(error, Exception) for error in found)
        assert "ring #1" in text
        assert "barrier #1" in text
        assert all(world.is_broken for world in worlds)


@pytest.mark.parametrize("backend", ["memory", "gloo"])
async def test_cancelling_breaks_the_world(backend: str, ring: Collective) -> None:
    """The other members count on this one, and are informed."""
    async with Arena(backend) as arena:
        worlds = await arena.world(2)
        calling = asyncio.create_task(pass_on(worlds[0], Call(ring, torch.ones(1))))
        await turns(3)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert worlds[0].is_broken
        await worlds[1].wait_over()
        with pytest.raises(WorldBrokenError, match="ring"):
            await worlds[1].barrier()


@pytest.mark.parametrize("backend", ["memory", "gloo"])
async def test_cancelling_before_its_turn_breaks_the_world_too(
    backend: str, ring: Collective
) -> None:
    """The others will call it, and would wait for this member for ever."""
    async with Arena(backend) as arena:
        worlds = await arena.world(2)
        first = asyncio.create_task(worlds[0].all_reduce(torch.ones(1)))
        await turns(3)
        second = asyncio.create_task(pass_on(worlds[0], Call(ring, torch.ones(1))))
        await turns(3)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        is_broken = worlds[0].is_broken
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert is_broken
