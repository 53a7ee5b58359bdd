"""Joining, growing and reforming: refusals, losses on the way, notices of a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from multiworld import (
    ConfigError,
    JoinMismatchError,
    JoinTimeoutError,
    MemberLostError,
    RankTakenError,
    World,
    WorldBrokenError,
    WorldClosedError,
    WorldConfig,
    WorldExistsError,
    WorldManager,
)
from multiworld.rendezvous import joiner
from multiworld.rendezvous.store_address import parse_store
from multiworld.rendezvous.store_messages import MemberGaveUp, NewcomerWaits
from multiworld.testing import Arena, no_leaks
from multiworld.world import joining as admission_module
from multiworld.world import manager as manager_module
from multiworld.world.joining import Admission
from tests.recorded import recorded
from tests.unit.waiting import turns, until


@pytest.fixture
def admissions() -> Iterator[list[Admission]]:
    with recorded(manager_module, Admission) as made:
        yield made


@pytest.fixture
async def arena(admissions: list[Admission]) -> AsyncIterator[Arena]:
    async with no_leaks(), Arena("memory", WorldConfig(join_s=0.3)) as arena:
        yield arena


async def lose(arena: Arena, rank: int, worlds: list[World]) -> None:
    """End a rank's manager as a killed process ends; wait until the others know."""
    arena.managers[rank].watchdog.close_nowait(politely=False)
    await asyncio.gather(*(w.wait_over() for w in worlds if w.rank != rank))


# Joining.


async def test_rank_of_a_live_process_is_taken(arena: Arena) -> None:
    """The holder answers the store's question."""
    await arena.world(2, "w")
    other = WorldManager(config=arena.config)
    with pytest.raises(RankTakenError):
        await other.join("w", rank=0, size=2, store=arena.store, backend="memory")
    await other.close()


async def test_rank_of_a_dead_process_is_free(arena: Arena) -> None:
    worlds = await arena.world(2, "w")
    await lose(arena, 1, worlds)
    arena.managers[1].cleanup()
    arena.managers[1] = WorldManager(config=arena.config)
    again = await arena.world(2, "w")
    assert [world.epoch for world in again] == [2, 2]
    assert worlds[0].is_closed


async def test_members_that_ask_for_different_sizes_are_all_notified(
    arena: Arena,
) -> None:
    found = await asyncio.gather(
        arena.join("w", 0, 2), arena.join("w", 1, 3), return_exceptions=True
    )
    assert JoinMismatchError in map(type, found)
    assert all(isinstance(error, Exception) for error in found)
    assert arena.manager(0).worlds == {}


async def test_member_lost_between_admission_and_opening_is_named(
    arena: Arena,
) -> None:
    """At whatever turn it dies, the other one gets an error in time, never a hang."""
    kinds: set[type] = set()
    for count in range(1, 25):
        name = f"w{count}"
        joins = [asyncio.create_task(arena.join(name, rank, 2)) for rank in (0, 1)]
        await turns(count)
        joins[1].cancel()
        arena.managers[1].watchdog.close_nowait(politely=False)
        found = (await asyncio.gather(*joins, return_exceptions=True))[0]
        arena.managers[1].cleanup()
        arena.managers[1] = WorldManager(config=arena.config)
        kinds.add(type(found))
        if isinstance(found, World):
            await found.wait_over()
    assert kinds <= {MemberLostError, WorldBrokenError, JoinTimeoutError, World}


# Growing.


@pytest.mark.parametrize("to", [2, 1, 0, -1, 2.5, "3", None, 1 << 20])
async def test_world_grows_only_to_a_larger_size(arena: Arena, to: Any) -> None:
    worlds = await arena.world(2, "w")
    with pytest.raises(ConfigError, match="from 3"):
        await worlds[0].grow(to=to)
    await asyncio.gather(*(world.barrier() for world in worlds))


async def test_newcomer_is_let_in(arena: Arena) -> None:
    old = await arena.world(2, "w")
    joining = asyncio.create_task(arena.join("w", 2, 3))
    await until(lambda: all(world.waiting for world in old))
    grown = await asyncio.gather(*(world.grow(to=3) for world in old))
    newcomer = await joining
    assert [(w.rank, w.size, w.epoch) for w in (*grown, newcomer)] == [
        (0, 3, 2),
        (1, 3, 2),
        (2, 3, 2),
    ]
    await asyncio.gather(*(world.barrier() for world in (*grown, newcomer)))
    await until(lambda: all(world.is_closed for world in old))
    assert arena.managers[0].world("w") is grown[0]


async def test_world_that_nobody_joins_continues(arena: Arena) -> None:
    worlds = await arena.world(2, "w")
    for _ in range(2):
        with pytest.raises(JoinTimeoutError):
            await worlds[0].grow(to=3)
        await asyncio.gather(*(world.barrier() for world in worlds))


async def test_cancelled_growth_leaves_the_world_as_it_is(arena: Arena) -> None:
    worlds = await arena.world(2, "w")
    growing = asyncio.create_task(worlds[0].grow(to=3))
    await turns(3)
    with pytest.raises(WorldExistsError, match="already"):
        await worlds[0].grow(to=3)
    growing.cancel()
    await asyncio.gather(growing, return_exceptions=True)
    await asyncio.gather(*(world.barrier() for world in worlds))


async def test_member_lost_while_growing_ends_the_wait(arena: Arena) -> None:
    """A broken world cannot grow."""
    worlds = await arena.world(2, "w")
    growing = asyncio.create_task(worlds[0].grow(to=3))
    await turns(5)
    arena.managers[1].watchdog.close_nowait(politely=False)
    with pytest.raises(MemberLostError):
        await growing
    assert (await worlds[0].reform()).size == 1


# Reforming.


async def test_survivors_continue_in_a_smaller_world(arena: Arena) -> None:
    worlds = await arena.world(3, "w")
    await lose(arena, 1, worlds)
    found = await asyncio.gather(worlds[0].reform(), worlds[2].reform())
    assert [(w.rank, w.size, w.epoch) for w in found] == [(0, 2, 2), (1, 2, 2)]
    await asyncio.gather(*(world.barrier() for world in found))


async def test_survivors_continue_without_a_member_that_left(arena: Arena) -> None:
    """The world need not be broken for that."""
    worlds = await arena.world(3, "w")
    await worlds[2].close()
    await asyncio.gather(*(world.wait_incomplete() for world in worlds[:2]))
    found = await asyncio.gather(*(world.reform() for world in worlds[:2]))
    assert [world.size for world in found] == [2, 2]


async def test_survivors_continue_after_a_second_loss(arena: Arena) -> None:
    """A survivor that dies while it is waited for holds nobody up."""
    worlds = await arena.world(3, "w")
    await lose(arena, 1, worlds)
    reforming = asyncio.create_task(worlds[0].reform())
    await turns(5)
    arena.managers[2].watchdog.close_nowait(politely=False)
    found = await reforming
    assert (found.rank, found.size) == (0, 1)


async def test_survivor_that_does_not_come_is_named(arena: Arena) -> None:
    worlds = await arena.world(3, "w")
    await lose(arena, 1, worlds)
    with pytest.raises(JoinTimeoutError) as late:
        await worlds[0].reform()
    assert late.value.missing == (2,)
    found = await asyncio.gather(worlds[0].reform(), worlds[2].reform())
    assert [world.size for world in found] == [2, 2]


async def test_healthy_or_closed_world_cannot_be_reformed(arena: Arena) -> None:
    worlds = await arena.world(2, "w")
    with pytest.raises(ConfigError, match="broken or that a member has left"):
        await worlds[0].reform()
    await worlds[0].close()
    for change in (worlds[0].reform(), arena.managers[0].grow("w", 3)):
        with pytest.raises(WorldClosedError, match="join it again"):
            await change


async def test_cancelled_reform_can_be_repeated(arena: Arena) -> None:
    """Cancelled at any turn, it leaves a world that reforms, or none."""
    for count in range(1, 15):
        worlds = await arena.world(2, f"w{count}")
        await lose(arena, 1, worlds)
        reforming = asyncio.create_task(worlds[0].reform())
        await turns(count)
        reforming.cancel()
        await asyncio.gather(reforming, return_exceptions=True)
        if worlds[0].is_broken and reforming.cancelled():
            assert (await worlds[0].reform()).size == 1
        arena.managers[1].cleanup()
        arena.managers[1] = WorldManager(config=arena.config)
    await arena.world(1, "other")


@pytest.mark.parametrize("is_growing", [False, True])
async def test_change_that_is_cancelled_as_it_is_admitted_ends_there(
    arena: Arena,
    admissions: list[Admission],
    monkeypatch: pytest.MonkeyPatch,
    is_growing: bool,
) -> None:
    """Members that wait for it are notified at once; it can reform or join again."""
    worlds = await arena.world(2, "w")
    me, real = admissions[0], joiner.meet
    changes: list[asyncio.Task[World]] = []

    async def meet(*args: Any, **kwargs: Any) -> Any:
        found = await real(*args, **kwargs)
        if args[0] is me.joiner:
            changes[0].cancel()
        return found

    monkeypatch.setattr(admission_module, "meet", meet)
    if is_growing:
        others = [arena.join("w", 2, 3), worlds[1].grow(to=3)]
        changes.append(asyncio.create_task(worlds[0].grow(to=3)))
    else:
        others = []
        await lose(arena, 1, worlds)
        changes.append(asyncio.create_task(worlds[0].reform()))
    found = await asyncio.gather(*changes, *others, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(isinstance(error, WorldBrokenError) for error in found[1:]), found
    monkeypatch.undo()
    if is_growing:
        assert worlds[0].is_ready, "it stays as it is, though the other has left it"
        arena.managers[1].cleanup()
        arena.managers[1] = WorldManager(config=arena.config)
        assert (await arena.world(2, "w"))[0].epoch == 3
    else:
        again = await worlds[0].reform()
        assert (again.size, again.epoch) == (1, 3)


# Questions and notices of a store.


async def test_store_learns_what_is_held_and_nothing_else(
    arena: Arena, admissions: list[Admission]
) -> None:
    where = parse_store(arena.store)
    worlds = await asyncio.gather(arena.world(2, "a"), arena.world(2, "b"))
    held = admissions[0]
    assert held.holds("a", 1, 0)
    assert not held.holds("a", 2, 0)
    assert not held.holds("a", 1, 1)
    assert not held.holds("x", 1, 0)
    assert [(h.world, h.epoch, h.rank) for h in held.holdings(where)] == [
        ("a", 1, 0),
        ("b", 1, 0),
    ]
    assert held.holdings(parse_store("memory://elsewhere")) == []
    await worlds[0][0].close()
    await lose(arena, 1, worlds[1])
    assert held.holdings(where) == []
    assert not held.holds("b", 1, 0)


async def test_note_about_another_incarnation_is_ignored(
    arena: Arena, admissions: list[Admission]
) -> None:
    """It may be older than what this process knows."""
    (world,) = await arena.world(1, "w")
    held = admissions[0]
    for name, epoch in (("w", 2), ("x", 1)):
        held.noticed(MemberGaveUp(name, epoch, 0))
        held.noticed(NewcomerWaits(name, epoch, 0, 2, is_gone=False))
    assert world.is_ready
    assert world.waiting == {}


async def test_notice_that_comes_with_the_admission_is_kept(
    arena: Arena, admissions: list[Admission]
) -> None:
    """The store sends it right after the admission, before the joiner runs again."""
    joining = asyncio.create_task(arena.join("w", 0, 2))
    await until(lambda: bool(admissions))
    await turns(5)
    admissions[0].noticed(MemberGaveUp("w", 1, 1))
    found = await asyncio.gather(joining, arena.join("w", 1, 2), return_exceptions=True)
    assert isinstance(found[0], MemberLostError), found
    assert found[0].rank == 1


async def test_join_does_not_wait_for_a_member_that_asks_again(
    arena: Arena, admissions: list[Admission]
) -> None:
    """It lost its session as it was admitted, so it will never connect."""
    joining = asyncio.create_task(arena.join("w", 0, 2))
    await until(lambda: bool(admissions))
    await turns(5)
    # Others wait for the next incarnation.
    admissions[0].noticed(NewcomerWaits("w", 1, 1, 3, is_gone=False))
    admissions[0].noticed(NewcomerWaits("w", 1, 1, 2, is_gone=True))
    admissions[0].noticed(NewcomerWaits("w", 1, 1, 2, is_gone=False))
    found = await asyncio.gather(joining, arena.join("w", 1, 2), return_exceptions=True)
    assert isinstance(found[0], MemberLostError), found
    assert found[0].rank == 1
    assert "claimed its rank again" in str(found[0])


async def test_reform_does_not_expel_who_has_the_rank_that_a_newcomer_wants(
    arena: Arena,
) -> None:
    """Ranks have moved up, and the newcomer names the previous size."""
    worlds = await arena.world(3, "w")
    await lose(arena, 1, worlds)
    store, backend = arena.store, arena.backend
    joining = asyncio.create_task(
        arena.manager(3).join("w", rank=1, size=3, store=store, backend=backend)
    )
    await turns(20)
    survivors = [world for world in worlds if world.rank != 1]
    reformed = await asyncio.gather(*(world.reform() for world in survivors))
    assert [(world.rank, world.size) for world in reformed] == [(0, 2), (1, 2)]
    await until(lambda: all(world.waiting == {1: 3} for world in reformed))
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


async def test_newcomer_in_place_of_a_member_that_is_there_breaks_nothing(
    arena: Arena, admissions: list[Admission]
) -> None:
    """The newcomer waits until that member is lost."""
    (first, _) = await arena.world(2, "w")
    admissions[0].noticed(NewcomerWaits("w", 1, 1, 2, is_gone=False))
    assert first.is_ready
    assert first.waiting == {1: 2}


async def test_newcomer_that_waits_is_announced_to_survivors_that_reform(
    arena: Arena,
) -> None:
    """They may grow the world at once: the newcomer has long been there."""
    worlds = await arena.world(3, "w")
    joining = asyncio.create_task(arena.join("w", 3, 4))
    await until(lambda: all(world.waiting for world in worlds))
    await lose(arena, 2, worlds)
    reformed = await asyncio.gather(*(world.reform() for world in worlds[:2]))
    await until(lambda: all(world.waiting == {3: 4} for world in reformed))
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


async def test_member_that_gave_up_while_it_was_admitted_breaks_the_world(
    arena: Arena, admissions: list[Admission]
) -> None:
    """Nobody waits for a member that will never connect."""
    worlds = await arena.world(2, "w")
    admissions[0].noticed(MemberGaveUp("w", 1, 1))
    with pytest.raises(MemberLostError, match="gave up") as lost:
        await worlds[0].barrier()
    assert lost.value.rank == 1
