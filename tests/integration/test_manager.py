"""The manager: events, cleanup, forks and the interface by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from typing import Any

import pytest
import torch

from multiworld import (
    EventsDropped,
    MemberLeft,
    MemberLeftError,
    MemberLost,
    UsedAfterForkError,
    WorldBroken,
    WorldBrokenError,
    WorldClosed,
    WorldConfig,
    WorldManager,
    WorldReady,
)
from multiworld.incarnation.event_hub import QUEUE_LIMIT, EventHub
from multiworld.incarnation.lifecycle import Failed
from multiworld.liveness.manager_messages import Left, WorldMessage
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Arena, ProcessFleet, no_leaks
from multiworld.world import joining
from multiworld.world.local_member import LocalMember
from tests import bodies
from tests.ports import free_port
from tests.recorded import recorded


async def test_events_report_the_life_of_a_world(fork_server: None) -> None:
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    seen = []
    async with ProcessFleet() as fleet:
        async with WorldManager() as manager:
            events = manager.events()
            child = fleet.start(bodies.idle, "w", store, "direct")
            world = await manager.join("w", rank=0, size=2, store=store)
            await child.report()
            child.kill()
            await world.wait_over()
            await world.close()
            single = await manager.join("v", rank=0, size=1, store=store)
            await single.close()
        seen = [event async for event in events]
    kinds = [type(event) for event in seen]
    assert kinds[:4] == [WorldReady, MemberLost, WorldBroken, WorldClosed]
    assert kinds[4:] == [WorldReady, WorldClosed]
    assert isinstance(seen[1], MemberLost)
    assert (seen[1].world, seen[1].rank, seen[1].epoch) == ("w", 1, 1)
    await server.close()


async def test_leave_is_an_event_and_no_loss() -> None:
    async with Arena("direct") as arena:
        left, right = await arena.world(2)
        events = arena.manager(1).events()
        await left.close()
        event = await anext(events)
        assert event == MemberLeft(world=right.name, epoch=1, rank=0)


async def test_slow_reader_of_events_learns_how_many_it_missed() -> None:
    hub = EventHub()
    subscription = hub.subscribe()
    for number in range(QUEUE_LIMIT + 5):
        hub.publish(WorldClosed(world="w", epoch=number))
    hub.close()
    events = [event async for event in subscription.events()]
    assert events[0] == EventsDropped(world="", epoch=0, count=5)
    assert len(events) == QUEUE_LIMIT + 1


async def test_cleanup_frees_everything_at_once() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    async with no_leaks(allow=("asyncio_",)):
        for backend in ("direct", "gloo"):
            one, two = WorldManager(), WorldManager()
            await asyncio.gather(
                one.join("w", rank=0, size=2, store=store, backend=backend),
                two.join("w", rank=1, size=2, store=store, backend=backend),
            )
            await one.communicator.send(torch.ones(3), 1, "w")
            one.cleanup()
            one.cleanup()
            got = torch.zeros(3)
            await two.communicator.recv(got, 0)
            assert torch.equal(got, torch.ones(3))
            assert not two.world("w").is_broken
            two.cleanup()
            assert one.communicator.is_broken("w")
            assert one.communicator.is_broken("never")


async def test_by_name_interface_has_every_operation() -> None:
    """Its argument order is that of pymultiworld."""
    port = free_port()
    one, two = WorldManager(), WorldManager()
    for rank, manager in enumerate((one, two)):
        assert manager.communicator is manager.communicator
        if rank == 0:
            joining = asyncio.ensure_future(
                manager.initialize_world("w", 0, 2, "direct", "127.0.0.1", port)
            )
        else:
            await manager.initialize_world(
                "w", 1, 2, backend="direct", addr="127.0.0.1", port=port, timeout=20
            )
    await joining

    async def member(manager: WorldManager, rank: int) -> None:
        c = manager.communicator
        if rank == 0:
            await c.send(torch.ones(2), 1, "w")
        else:
            await c.recv(torch.zeros(2), 0, "w")
        tensor = torch.full((2,), float(rank))
        await c.broadcast(tensor, 1, "w")
        assert torch.equal(tensor, torch.ones(2))
        await c.all_reduce(tensor, world_name="w")
        assert torch.equal(tensor, torch.full((2,), 2.0))
        await c.reduce(tensor, 0, torch.distributed.ReduceOp.MAX, "w")
        tensors = [torch.zeros(2), torch.zeros(2)]
        await c.all_gather(tensors, torch.full((2,), float(rank)), "w")
        assert [int(t[0]) for t in tensors] == [0, 1]
        await c.gather(tensor, tensors if rank == 0 else None, 0, "w")
        await c.scatter(tensor, tensors if rank == 0 else None, 0, "w")
        await c.scatter(tensor, tensors if rank == 0 else [], 0, "w")
        assert not c.is_broken("w")

    await asyncio.gather(member(one, 0), member(two, 1))
    one.cleanup()
    two.cleanup()


async def test_forked_child_can_not_use_its_parents_worlds(fork_server: None) -> None:
    async with Arena("direct") as arena:
        left, right = await arena.world(2)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            text = "nothing raised"
            try:
                # Not awaited on a loop: the check comes before anything is waited for.
                left.send(torch.ones(1), dst=1).send(None)
            except UsedAfterForkError as error:
                text = f"{type(error).__name__}: {error}"
            finally:
                os.write(writer, text.encode())
                os._exit(0)
        await asyncio.to_thread(os.waitpid, pid, 0)
        text = os.read(reader, 1000).decode()
        os.close(reader)
        os.close(writer)
        assert text.startswith("UsedAfterForkError"), text
        await asyncio.gather(left.send(torch.ones(1), dst=1), right.recv(src=0))


async def test_forked_child_keeps_its_own_files(fork_server: None) -> None:
    """Inherited sockets close their descriptor numbers when they are freed."""
    async with Arena("direct") as arena:
        await arena.world(2)
        pid = os.fork()
        if pid == 0:
            closed = 255
            try:
                mine = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
                for manager in arena.managers:
                    with contextlib.suppress(Exception):
                        manager.watchdog.close_nowait(politely=False)
                closed = sum(not is_open(number) for number in mine)
            finally:
                os._exit(closed)
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_manager_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        WorldManager()


async def test_reprs_are_status_lines() -> None:
    async with Arena("direct") as arena:
        left, _ = await arena.world(2, "edge:a-b")
        assert repr(left) == "<World 'edge:a-b' ready rank 0/2 epoch 1 direct>"
        assert re.match(
            r"<WorldManager 1/1 worlds ready, 1 links>", repr(arena.manager(0))
        )
        statistics = left.statistics()
        assert (statistics.phase, statistics.pending) == ("ready", 0)
        assert all("process" in member for member in left.members)


async def test_thread_heartbeat_and_no_monitor() -> None:
    """A thread can send heartbeats; without a monitor, a closed link is a loss."""
    config = WorldConfig(join_s=20, heartbeat="thread")
    async with no_leaks(allow=("asyncio_",)):
        async with Arena("direct", config) as arena:
            await arena.world(2)
            assert arena.manager(0).watchdog.helper_pid is None
            await asyncio.sleep(3)  # longer than the silence that would be noticed
            assert all(m.worlds for m in arena.managers)
        store = f"tcp://127.0.0.1:{free_port()}"
        async with WorldManager(False) as one, WorldManager(False) as two:
            left, right = await asyncio.gather(
                one.join("w", rank=0, size=2, store=store),
                two.join("w", rank=1, size=2, store=store),
            )
            two.watchdog.close_nowait(politely=False)
            await left.wait_over()
            assert left.is_broken
            assert right.is_ready


async def test_helper_that_is_killed_is_replaced() -> None:
    async with Arena("direct") as arena:
        left, right = await arena.world(2)
        helper = arena.manager(0).watchdog.helper_pid
        assert helper is not None
        os.kill(helper, 9)
        await asyncio.sleep(3)  # longer than the silence that would be noticed
        assert left.is_ready
        assert right.is_ready
        assert arena.manager(0).watchdog.helper_pid not in (None, helper)


async def test_world_that_breaks_between_two_lanes_of_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A world that breaks ends the wait for a lane that was not requested yet."""
    async with Arena("direct") as arena:
        with recorded(joining, LocalMember) as members:
            world, *_ = await arena.world(3)
        (member,) = (m for m in members if m.rank == world.rank)
        watchdog, loop = arena.manager(world.rank).watchdog, asyncio.get_running_loop()
        lane, asked = watchdog.lane, []

        async def open_lane(*where: Any) -> object:
            asked.append(where)
            if len(asked) == 1:
                opened = await lane(*where)
                # After this lane is there, and before its waiter runs.
                loop.call_soon(member.report, Failed("for the test"))
                return opened
            return await loop.create_future()

        monkeypatch.setattr(watchdog, "lane", open_lane)
        async with asyncio.timeout(5):
            with pytest.raises(WorldBrokenError, match="for the test"):
                await world.all_reduce(torch.ones(8))
        assert len(asked) == 1


async def test_who_has_left_is_known_when_the_first_operation_fails_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a member's data may overtake the message that it leaves."""
    async with Arena("direct") as arena:
        stays, leaves = await arena.world(2)
        said: list[WorldMessage] = []
        watchdog = arena.manager(leaves.rank).watchdog
        monkeypatch.setattr(watchdog, "notify", lambda _, message: said.append(message))
        closing = asyncio.create_task(leaves.close())
        with pytest.raises(MemberLeftError):
            await stays.recv(torch.zeros(1), src=1)
        assert stays.left == {1}
        assert stays.is_ready, "no verdict follows from it"
        assert arena.manager(0).communicator.is_broken(stays.name)
        await closing
        (message,) = said
        assert isinstance(message, Left)
        assert not message.is_broken
