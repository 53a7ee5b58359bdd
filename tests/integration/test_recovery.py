"""Reforming, growing and keeping worlds, on every backend that members can share."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

import pytest
import torch

from multiworld import (
    ConfigError,
    JoinTimeoutError,
    MemberLostError,
    MemberWaiting,
    StaleEpochError,
    World,
    WorldBrokenError,
    WorldClosedError,
    WorldConfig,
    WorldExistsError,
    WorldManager,
)
from multiworld.incarnation.lifecycle import WasLost
from multiworld.rendezvous.joiner import _local_services
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import no_leaks
from multiworld.world import joining
from multiworld.world.local_member import LocalMember
from tests.recorded import recorded
from tests.traffic import Traffic
from tests.unit.inner_state import waiting_count
from tests.until import until

CONFIG = WorldConfig(join_s=10)
BACKENDS = ["direct", "gloo", "memory"]
HANG_S = 20.0


class Street:
    """Several managers in one process, and a store."""

    def __init__(
        self,
        managers: list[WorldManager],
        store: str,
        backend: str,
        waiting: Callable[[], int],
        members: list[LocalMember],
    ) -> None:
        self.managers, self.store, self.backend = managers, store, backend
        self._waiting, self._members = waiting, members

    def member(self, world: World) -> LocalMember:
        wanted = (world.name, world.epoch, world.rank)
        (found,) = (
            m
            for m in self._members
            if (m.incarnation.world, m.incarnation.epoch, m.rank) == wanted
        )
        return found

    def lose(self, world: World, rank: int) -> None:
        self.member(world).report(WasLost(rank, "the test says so"))

    async def has_waiting(self, count: int) -> None:
        await until(lambda: self._waiting() == count)

    async def join(self, number: int, rank: int, size: int, name: str = "w") -> World:
        return await self.managers[number].join(
            name,
            rank=rank,
            size=size,
            store=self.store,
            backend=self.backend,
            config=CONFIG,
        )

    async def world(self, *numbers: int, name: str = "w") -> list[World]:
        """Join a world of these managers, in this order of ranks."""
        size = len(numbers)
        joins = [
            self.join(number, rank, size, name) for rank, number in enumerate(numbers)
        ]
        return await asyncio.gather(*joins)


@pytest.fixture(params=BACKENDS)
async def street(request: pytest.FixtureRequest) -> AsyncIterator[Street]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(no_leaks(allow=("asyncio_",)))
        if request.param == "memory":
            store = "memory://street"

            def waiting() -> int:
                return waiting_count(_local_services["street"])
        else:
            server = await StoreServer.listen("127.0.0.1", 0)
            stack.push_async_callback(server.close)
            store = f"tcp://127.0.0.1:{server.port}"

            def waiting() -> int:
                return waiting_count(server)

        managers = [
            await stack.enter_async_context(WorldManager(config=CONFIG))
            for _ in range(4)
        ]
        members = stack.enter_context(recorded(joining, LocalMember))
        yield Street(managers, store, request.param, waiting, members)


async def check(worlds: Sequence[World]) -> None:
    tensors = [torch.ones(3) * (world.rank + 1) for world in worlds]
    await asyncio.gather(
        *(w.all_reduce(t) for w, t in zip(worlds, tensors, strict=True))
    )
    total = sum(range(1, len(worlds) + 1))
    assert all(tensor.tolist() == [total] * 3 for tensor in tensors)
    if len(worlds) > 1:
        await worlds[0].send(torch.arange(4), dst=len(worlds) - 1)
        assert (await worlds[-1].recv(src=0)).tolist() == [0, 1, 2, 3]


async def test_survivors_reform_in_one_call_with_compacted_ranks(
    street: Street,
) -> None:
    w0, w1, w2 = await street.world(0, 1, 2)
    others = await street.world(0, 2, name="other")
    async with echo(others[1]), Traffic(others[0]) as traffic:
        street.managers[1].cleanup()
        for world in (w0, w2):
            await asyncio.wait_for(world.wait_incomplete(), HANG_S)
        await traffic.advances(5)
        new = await asyncio.gather(w0.reform(), w2.reform())
        assert [(w.rank, w.size, w.epoch, w.name) for w in new] == [
            (0, 2, 2, "w"),
            (1, 2, 2, "w"),
        ]
        await check(new)
        await traffic.advances(5)
    assert w1.is_closed
    for old, world, number in ((w0, new[0], 0), (w2, new[1], 2)):
        assert street.managers[number].world("w") is world
        with pytest.raises((WorldBrokenError, WorldClosedError)):
            await old.barrier()


def echo(world: World) -> EchoTask:
    return EchoTask(world)


class EchoTask:
    def __init__(self, world: World) -> None:
        self._world = world

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._world.send(await self._world.recv(src=0), dst=0)


async def test_lone_survivor_continues_alone(street: Street) -> None:
    w0, _ = await street.world(0, 1)
    street.managers[1].cleanup()
    await asyncio.wait_for(w0.wait_incomplete(), HANG_S)
    alone = await w0.reform()
    assert (alone.rank, alone.size, alone.epoch) == (0, 1, 2)
    await check([alone])


async def test_accused_member_is_fenced_and_can_join_again(street: Street) -> None:
    w0, w1, w2 = await street.world(0, 1, 2)
    street.lose(w0, 1)
    for world in (w1, w2):
        await asyncio.wait_for(world.wait_over(), HANG_S)
    with pytest.raises(MemberLostError) as lost:
        await w2.barrier()
    assert lost.value.rank == 1
    with pytest.raises(StaleEpochError) as stale:
        await w1.barrier()
    assert (stale.value.seen, stale.value.expected) == (1, 2)
    with pytest.raises(StaleEpochError):
        await w1.reform()
    new = await asyncio.gather(w0.reform(), w2.reform())
    grown = await asyncio.gather(
        *(world.grow(to=3) for world in new), street.join(1, 2, 3)
    )
    assert [(w.rank, w.epoch) for w in grown] == [(0, 3), (1, 3), (2, 3)]
    await check(list(grown))


async def test_two_that_accuse_each_other_do_not_both_continue(street: Street) -> None:
    w0, w1 = await street.world(0, 1)
    street.lose(w0, 1)
    street.lose(w1, 0)
    results = await asyncio.gather(w0.reform(), w1.reform(), return_exceptions=True)
    kinds = {type(result) for result in results}
    assert kinds == {World, StaleEpochError}, results


async def test_member_lost_while_reforming_is_left_out_too(street: Street) -> None:
    worlds = await street.world(0, 1, 2, 3)
    street.managers[3].cleanup()
    for world in worlds[:3]:
        await asyncio.wait_for(world.wait_incomplete(), HANG_S)
    reforming = [asyncio.create_task(worlds[n].reform()) for n in (0, 1)]
    await street.has_waiting(2)
    assert not any(task.done() for task in reforming)
    street.managers[2].cleanup()
    new = await asyncio.wait_for(asyncio.gather(*reforming), HANG_S)
    assert [(w.rank, w.size) for w in new] == [(0, 2), (1, 2)]
    await check(new)


async def test_survivor_that_closes_is_not_waited_for(street: Street) -> None:
    w0, w1, _ = await street.world(0, 1, 2)
    street.managers[2].cleanup()
    for world in (w0, w1):
        await asyncio.wait_for(world.wait_incomplete(), HANG_S)
    reforming = asyncio.create_task(w0.reform())
    await street.has_waiting(1)
    await w1.close()
    new = await asyncio.wait_for(reforming, 5)
    assert new.size == 1


async def test_one_change_of_a_name_at_a_time(street: Street) -> None:
    w0, w1 = await street.world(0, 1)
    street.lose(w0, 1)
    await asyncio.wait_for(w1.wait_over(), HANG_S)
    first = asyncio.create_task(w0.reform())
    await asyncio.sleep(0)
    with pytest.raises(WorldExistsError):
        await w0.reform()
    with pytest.raises(WorldExistsError):
        await street.join(0, 0, 2)
    assert (await asyncio.wait_for(first, 5)).size == 1


async def test_nothing_continues_after_leave_or_close(street: Street) -> None:
    worlds = await street.world(0, 1, 2)
    street.managers[2].cleanup()
    for world in worlds[:2]:
        await asyncio.wait_for(world.wait_incomplete(), HANG_S)
    left = asyncio.create_task(worlds[0].reform())
    closed = asyncio.create_task(worlds[1].grow(to=4))
    await street.has_waiting(2)
    await street.managers[0].leave("w")
    await street.managers[1].close()
    results = await asyncio.gather(left, closed, return_exceptions=True)
    assert not any(isinstance(result, World) for result in results), results
    assert street.managers[0].worlds == {}


async def test_newcomer_that_dies_after_its_admission_leaves_a_world_to_reform(
    street: Street, monkeypatch: pytest.MonkeyPatch
) -> None:
    w0, w1 = await street.world(0, 1)

    real = LocalMember.open

    async def dies(member: LocalMember) -> None:
        if member.rank < 2:
            return await real(member)
        street.managers[2].cleanup()
        raise asyncio.CancelledError

    monkeypatch.setattr(LocalMember, "open", dies)
    newcomer = asyncio.create_task(street.join(2, 2, 3))
    results = await asyncio.wait_for(
        asyncio.gather(w0.grow(to=3), w1.grow(to=3), return_exceptions=True), 8
    )
    await asyncio.gather(newcomer, return_exceptions=True)
    for result in results:
        assert isinstance(result, WorldBrokenError), result
    new = await asyncio.wait_for(asyncio.gather(w0.reform(), w1.reform()), HANG_S)
    assert [(w.rank, w.size, w.epoch) for w in new] == [(0, 2, 3), (1, 2, 3)]
    await check(new)


async def test_healthy_world_has_nothing_to_reform(street: Street) -> None:
    worlds = await street.world(0, 1)
    with pytest.raises(ConfigError, match="broken"):
        await worlds[0].reform()
    await check(worlds)


async def test_members_learn_who_waits_and_admit_it(street: Street) -> None:
    """Growing drops no message that was received."""
    w0, w1 = await street.world(0, 1)
    others = await street.world(0, 3, name="other")
    async with echo(others[1]), Traffic(others[0]) as traffic:
        events = street.managers[0].events()
        joining = asyncio.create_task(street.join(2, 2, 3))
        event = await asyncio.wait_for(anext(events), HANG_S)
        assert isinstance(event, MemberWaiting)
        assert (event.rank, event.size, event.epoch) == (2, 3, 1)
        assert w0.waiting == {2: 3}
        await check([w0, w1])  # the old world works until all members have arrived
        grown = await asyncio.gather(w0.grow(to=3), w1.grow(to=3), joining)
        assert [(w.rank, w.size, w.epoch) for w in grown] == [
            (0, 3, 2),
            (1, 3, 2),
            (2, 3, 2),
        ]
        await check(list(grown))
        await traffic.advances(5)
        names = {type(e).__name__ for e in await drain(events)}
        assert "MemberLost" not in names
        assert "WorldBroken" not in names


async def drain(events: AsyncIterator[object]) -> list[object]:
    found: list[object] = []
    while True:
        try:
            found.append(await asyncio.wait_for(anext(events), 0.1))
        except (TimeoutError, StopAsyncIteration):
            return found


async def test_failed_growth_leaves_the_world_as_it_was(street: Street) -> None:
    """In vain: no newcomer comes, or growing is cancelled."""
    worlds = await street.world(0, 1)
    short = CONFIG.replace(join_s=0.5)
    for world in worlds:
        member = street.member(world)
        member.request = dataclasses.replace(member.request, config=short)
    results = await asyncio.gather(
        *(world.grow(to=3) for world in worlds), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, JoinTimeoutError), result
        assert 2 in result.missing
    await check(worlds)
    growing = asyncio.create_task(worlds[0].grow(to=4))
    await street.has_waiting(1)
    growing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await growing
    await check(worlds)
    with pytest.raises(ConfigError):
        await worlds[0].grow(to=2)


async def test_loss_while_growing_is_raised_at_once(street: Street) -> None:
    w0, w1, _ = await street.world(0, 1, 2)
    growing = [asyncio.create_task(world.grow(to=4)) for world in (w0, w1)]
    await street.has_waiting(2)
    street.lose(w0, 2)
    for task in growing:
        with pytest.raises(MemberLostError):
            await asyncio.wait_for(task, 5)
    new = await asyncio.gather(w0.reform(), w1.reform())
    await check(new)


async def test_kept_world_is_rejoined_until_it_is_left(street: Street) -> None:
    seen: list[int] = []
    done = asyncio.Event()

    async def stay() -> None:
        kept = street.managers[0].keep(
            "w",
            rank=0,
            size=2,
            store=street.store,
            backend=street.backend,
            config=CONFIG.replace(join_s=1.0),
        )
        async for world in kept:
            seen.append(world.epoch)
            try:
                while True:
                    await world.send(await world.recv(src=1), dst=1)
            except (WorldBrokenError, WorldClosedError):
                pass
        done.set()

    staying = asyncio.create_task(stay())
    for number in (1, 2, 3):
        world = await street.join(number, 1, 2)
        await world.send(torch.ones(1), dst=0)
        await world.recv(src=0)
        if number < 3:
            street.managers[number].cleanup()
    await street.managers[0].leave("w")
    await asyncio.wait_for(done.wait(), HANG_S)
    await staying
    assert len(seen) == 3
    assert seen == sorted(set(seen))
