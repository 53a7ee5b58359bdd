"""A process's worlds: names, closing, cancelling, and faults that stay in one world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from multiworld import (
    ConfigError,
    JoinTimeoutError,
    MemberLeftError,
    Security,
    UnknownWorldError,
    WorldBrokenError,
    WorldClosedError,
    WorldConfig,
    WorldExistsError,
    WorldManager,
)
from multiworld.events import Event, WorldBroken, WorldClosed, WorldReady
from multiworld.testing import Arena, no_leaks
from tests.unit.waiting import turns, until

SHORT = WorldConfig(join_s=0.02)


@pytest.fixture
async def arena() -> AsyncIterator[Arena]:
    async with no_leaks(), Arena("memory") as arena:
        yield arena


def die(arena: Arena, rank: int) -> None:
    """End a rank's manager as if its process had been killed."""
    arena.managers[rank].watchdog.close_nowait(politely=False)


def tasks_named(text: str) -> list[asyncio.Task[object]]:
    return [t for t in asyncio.all_tasks() if t.get_name().startswith(text)]


async def works(arena: Arena, name: str) -> None:
    worlds = [manager.worlds[name] for manager in arena.managers]
    await asyncio.gather(*(world.barrier() for world in worlds))


async def test_join_of_a_world_twice_is_refused(arena: Arena) -> None:
    joining = asyncio.create_task(arena.join("w", 0, 2))
    await turns(3)
    for _ in range(2):
        with pytest.raises(WorldExistsError):
            await arena.join("w", 0, 2)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
    await arena.world(2, "w")
    with pytest.raises(WorldExistsError, match="epoch 1"):
        await arena.join("w", 0, 2)
    await works(arena, "w")


async def test_cancelled_join_leaves_the_name_free(arena: Arena) -> None:
    for count in range(1, 12):
        joins = [asyncio.create_task(arena.join("w", rank, 2)) for rank in (0, 1)]
        await turns(count)
        joins[0].cancel()
        joins[1].cancel()
        await asyncio.gather(*joins, return_exceptions=True)
        for rank in (0, 1):
            manager = arena.managers[rank]
            if "w" in manager.worlds:
                await manager.leave("w")
    await arena.world(2, "w")
    await works(arena, "w")


async def test_join_that_fails_leaves_nothing(arena: Arena) -> None:
    await arena.world(1, "other")
    manager = arena.manager(0)
    with pytest.raises(JoinTimeoutError):
        await manager.join(
            "w", rank=0, size=2, store=arena.store, backend="memory", config=SHORT
        )
    with pytest.raises(ConfigError):
        await manager.join("w", rank=5, size=2, store=arena.store, backend="memory")
    assert list(manager.worlds) == ["other"]
    with pytest.raises(UnknownWorldError, match="it is in: other"):
        manager.world("w")


async def test_lost_member_breaks_only_the_worlds_it_was_in(arena: Arena) -> None:
    await asyncio.gather(arena.world(3, "all"), arena.world(2, "pair"))
    receiving = [
        asyncio.create_task(arena.managers[rank].world("all").recv(src=2))
        for rank in (0, 1)
    ]
    await turns(3)
    die(arena, 2)
    for task in receiving:
        with pytest.raises(WorldBrokenError, match="rank 2"):
            await task
    pair = [arena.managers[rank].world("pair") for rank in (0, 1)]
    await asyncio.gather(*(world.barrier() for world in pair))
    assert arena.managers[0].world("all").lost == {2}
    assert "1/2 worlds ready" in repr(arena.managers[0])


async def test_broken_world_is_replaced_by_the_next_join(arena: Arena) -> None:
    old = (await arena.world(2, "w"))[0]
    die(arena, 1)
    await old.wait_over()
    arena.managers[1].cleanup()
    arena.managers[1] = WorldManager(config=arena.config)
    new = (await arena.world(2, "w"))[0]
    assert (old.epoch, new.epoch) == (1, 2)
    assert old.is_closed or old.is_broken
    assert arena.managers[0].world("w") is new
    await works(arena, "w")


async def test_closed_manager_refuses_everything(arena: Arena) -> None:
    manager = arena.manager(0)
    joining = asyncio.create_task(arena.join("w", 0, 2))
    keeping = manager.keep("v", rank=0, size=2, store=arena.store, backend="memory")
    kept = asyncio.ensure_future(anext(keeping, None))
    await turns(5)
    await manager.close()
    await manager.close()
    manager.cleanup()
    with pytest.raises(WorldClosedError, match="Manager is closed"):
        await joining
    assert await kept is None
    for refused in (
        arena.join("w", 0, 1),
        manager.reform("w"),
        manager.grow("w", 2),
    ):
        with pytest.raises(WorldClosedError):
            await refused
    with pytest.raises(WorldClosedError):
        manager.keep("w", rank=0, size=1, store=arena.store)
    assert manager.worlds == {}


async def test_cleanup_frees_everything_at_once(arena: Arena) -> None:
    """Programs for pymultiworld call it last, without waiting."""
    worlds = await arena.world(2, "w")
    arena.managers[0].cleanup()
    arena.managers[0].cleanup()
    await worlds[1].wait_incomplete()
    assert worlds[0].is_closed
    with pytest.raises(MemberLeftError):
        await worlds[1].recv(src=0)
    with pytest.raises(WorldClosedError):
        await worlds[0].barrier()


async def test_cleanup_while_joining_leaves_nothing() -> None:
    """At whatever turn of the loop, the watchdog ends with its manager."""
    for count in range(1, 20):
        async with Arena("memory") as arena:
            joins = [asyncio.create_task(arena.join("w", rank, 2)) for rank in (0, 1)]
            await turns(count)
            arena.managers[0].cleanup()
            joins[1].cancel()
            await asyncio.gather(*joins, return_exceptions=True)
            for manager in arena.managers:
                manager.cleanup()
            await turns()
            watching = tasks_named("multiworld watchdog")
            for task in watching:
                task.cancel()
        assert not watching, f"after {count} turns"


async def test_world_that_was_left_is_unknown_and_can_be_joined(arena: Arena) -> None:
    worlds = await arena.world(2, "w")
    await arena.managers[0].leave("w")
    with pytest.raises(UnknownWorldError):
        await arena.managers[0].leave("w")
    await worlds[1].wait_incomplete()
    assert worlds[1].left == {0}
    again = await arena.world(2, "w")
    assert again[0].epoch == 2


async def collected(manager: WorldManager) -> list[Event]:
    return [event async for event in manager.events()]


async def test_events_report_the_life_of_each_world(arena: Arena) -> None:
    reading = asyncio.create_task(collected(arena.manager(0)))
    await turns(3)
    worlds = await arena.world(2, "w")
    die(arena, 1)
    await worlds[0].wait_over()
    await arena.managers[0].close()
    kinds = [type(event) for event in await reading]
    assert kinds[0] is WorldReady
    assert WorldBroken in kinds
    assert kinds.index(WorldReady) < kinds.index(WorldBroken)
    assert kinds.count(WorldClosed) <= 1


async def test_backend_that_bypasses_the_secret_is_refused_before_joining() -> None:
    security = Security(secret=b"a secret long enough to be one")
    async with no_leaks(), WorldManager(security=security) as manager:
        with pytest.raises(ConfigError, match="OPEN_BACKENDS"):
            await manager.join(
                "w", rank=0, size=1, store="tcp://127.0.0.1:1", backend="gloo"
            )
        assert manager.refused == {}


async def test_keep_joins_again_after_a_fault(arena: Arena) -> None:
    manager, other = arena.manager(0), arena.manager(1)
    epochs = []
    joining = asyncio.create_task(arena.join("w", 1, 2))
    async for world in manager.keep(
        "w", rank=0, size=2, store=arena.store, backend="memory"
    ):
        epochs.append(world.epoch)
        await joining
        if world.epoch == 2:
            await manager.leave("w")
        else:
            await other.leave("w")
            joining = asyncio.create_task(arena.join("w", 1, 2))
            with pytest.raises(MemberLeftError):
                await world.recv(src=1)
    assert epochs == [1, 2]


# Names of pymultiworld.


async def test_reserved_name_is_taken_until_it_is_removed(arena: Arena) -> None:
    """``initialize_world`` joins it; a failed attempt keeps the reservation."""
    manager = arena.manager(0)
    manager.add_world("w", "gloo")
    with pytest.raises(WorldExistsError):
        manager.add_world("w", "gloo")
    with pytest.raises(ConfigError):
        await manager.initialize_world("w", 0, 0, timeout=1)
    with pytest.raises(ValueError, match="'w' already"):
        manager.add_world("w", "gloo")
    manager.remove_world("w")
    with pytest.raises(ValueError, match="not in world"):
        manager.remove_world("w")
    await arena.world(1, "x")
    with pytest.raises(WorldExistsError):
        manager.add_world("x", "gloo")


async def test_removed_world_is_gone_at_once(arena: Arena) -> None:
    """The others are notified, though nobody waits here."""
    worlds = await arena.world(2, "w")
    await worlds[0].send(torch.ones(1), dst=1)
    arena.managers[0].remove_world("w")
    assert arena.managers[0].worlds == {}
    assert worlds[0].is_closed
    await worlds[1].wait_incomplete()
    assert (await worlds[1].recv(src=0)).item() == 1.0
    await until(lambda: not tasks_named("multiworld leave"))


async def test_world_that_is_removed_while_it_grows_is_gone() -> None:
    """At whatever turn of the loop, no closed world stays in the manager."""
    for count in range(1, 40):
        async with Arena("memory") as arena:
            await arena.world(1, "w")
            manager = arena.managers[0]
            growing = asyncio.create_task(manager.grow("w", 2))
            joining = asyncio.create_task(arena.join("w", 1, 2))
            await turns(count)
            if "w" in manager.worlds:
                manager.remove_world("w")
            joining.cancel()
            await asyncio.gather(growing, joining, return_exceptions=True)
            await until(lambda: not tasks_named("multiworld leave"))
            assert manager.worlds == {}, f"after {count} turns"
