"""Joining: order, deadlines, taken ranks, mismatches, untrusted peers and rejoining."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import msgspec
import pytest
import torch

from multiworld import (
    ConfigError,
    JoinMismatchError,
    JoinTimeoutError,
    MultiWorldError,
    ProtocolVersionError,
    RankTakenError,
    RendezvousError,
    StoreUnreachableError,
    UnknownWorldError,
    World,
    WorldBrokenError,
    WorldClosedError,
    WorldConfig,
    WorldExistsError,
    WorldManager,
    WorldReady,
)
from multiworld.net import frames
from multiworld.net.handshake_messages import Answer
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Arena, ProcessFleet, no_leaks
from tests import bodies
from tests.ports import free_port
from tests.traffic import Traffic
from tests.unit.inner_state import waiting_count
from tests.until import until
from tests.wire import frame_of

SHORT = WorldConfig(join_s=1.0)
LONG = WorldConfig(join_s=20.0)


@pytest.fixture
async def server() -> AsyncIterator[StoreServer]:
    async with no_leaks(allow=("asyncio_",)):
        server = await StoreServer.listen("127.0.0.1", 0)
        yield server
        await server.close()


@pytest.fixture
def store(server: StoreServer) -> str:
    return f"tcp://127.0.0.1:{server.port}"


async def one_waits(server: StoreServer) -> None:
    await until(lambda: waiting_count(server) > 0)


async def pair(one: WorldManager, two: WorldManager, name: str, store: str) -> None:
    await asyncio.gather(
        one.join(name, rank=0, size=2, store=store),
        two.join(name, rank=1, size=2, store=store),
    )


@pytest.mark.parametrize("first", [0, 1])
async def test_members_may_start_in_any_order(first: int) -> None:
    """Rank 0 embeds the store, and the others wait for it."""
    address = f"tcp://127.0.0.1:{free_port()}"
    async with no_leaks(), WorldManager() as one, WorldManager() as two:
        early = asyncio.ensure_future(one.join("w", rank=first, size=2, store=address))
        await asyncio.sleep(0)
        late = await two.join("w", rank=1 - first, size=2, store=address)
        world = await early
        assert {world.epoch, late.epoch} == {1}


async def test_deadline_names_who_is_missing(store: str) -> None:
    async with WorldManager(config=SHORT) as one, WorldManager(config=SHORT) as two:
        results = await asyncio.gather(
            one.join("w", rank=0, size=4, store=store),
            two.join("w", rank=2, size=4, store=store),
            return_exceptions=True,
        )
        for error in results:
            assert isinstance(error, JoinTimeoutError), error
            assert {1, 3} <= set(error.missing)
        # On a busy machine one deadline may pass before the other member's claim ends.
        first = [e for e in results if getattr(e, "present", ()) == (0, 2)]
        assert first
        assert getattr(first[0], "missing", ()) == (1, 3)
        assert one.worlds == {}


async def test_missing_store_is_reported_with_its_address() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    async with no_leaks(), WorldManager(config=SHORT) as manager:
        with pytest.raises(StoreUnreachableError, match="start rank 0") as caught:
            await manager.join("w", rank=1, size=2, store=address)
        assert caught.value.address == address


async def test_store_is_not_embedded_where_it_is_a_service_of_its_own() -> None:
    """Rank 0 waits for a separate store, as every member does."""
    address = f"tcp://127.0.0.1:{free_port()}"
    config = SHORT.replace(embed_store=False)
    async with no_leaks(), WorldManager(config=config) as manager:
        with pytest.raises(StoreUnreachableError):
            await manager.join("w", rank=0, size=2, store=address)


async def test_held_rank_is_refused_and_its_holder_not_disturbed(store: str) -> None:
    async with (
        WorldManager() as one,
        WorldManager() as two,
        WorldManager() as thief,
    ):
        await pair(one, two, "w", store)
        echo = asyncio.ensure_future(_echo(two))
        async with Traffic(one.world("w")) as traffic:
            for rank in (0, 1, 0, 1):
                with pytest.raises(RankTakenError, match="held by another"):
                    await thief.join("w", rank=rank, size=2, store=store)
                await traffic.advances(5)
        assert thief.worlds == {}
        echo.cancel()
        await asyncio.gather(echo, return_exceptions=True)


async def _echo(manager: WorldManager) -> None:
    world = manager.world("w")
    while True:
        await world.send(await world.recv(src=0), dst=0)


async def test_waiting_rank_is_taken_too(server: StoreServer, store: str) -> None:
    async with WorldManager(config=SHORT) as one, WorldManager() as two:
        waiting = asyncio.ensure_future(one.join("w", rank=0, size=2, store=store))
        await one_waits(server)
        with pytest.raises(RankTakenError):
            await two.join("w", rank=0, size=2, store=store)
        with pytest.raises(JoinTimeoutError):
            await waiting


async def test_rank_of_a_dead_holder_opens_the_next_epoch(
    store: str, fork_server: None
) -> None:
    async with ProcessFleet() as fleet, WorldManager(config=LONG) as manager:
        args = ("w", store, "direct")
        child = fleet.start(bodies.idle, *args)
        world = await manager.join("w", rank=0, size=2, store=store)
        await child.report()
        child.kill()
        replacement = fleet.start(bodies.idle, *args)
        await world.wait_over()
        again = await manager.join("w", rank=0, size=2, store=store)
        await replacement.report()
        assert (world.epoch, again.epoch) == (1, 2)


@pytest.mark.parametrize(
    ("size", "backend"), [(3, "direct"), (2, "gloo")], ids=["size", "backend"]
)
async def test_members_that_ask_for_different_worlds_are_all_notified(
    store: str, size: int, backend: str
) -> None:
    async with WorldManager(config=LONG) as one, WorldManager(config=LONG) as two:
        results = await asyncio.gather(
            one.join("w", rank=0, size=2, store=store),
            two.join("w", rank=1, size=size, store=store, backend=backend),
            return_exceptions=True,
        )
        for error in results:
            assert isinstance(error, JoinMismatchError), error
            assert "rank 0 asked for size 2, backend direct" in str(error)
            assert f"rank 1 asked for size {size}, backend {backend}" in str(error)
        await pair(one, two, "w", store)


async def body_from(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


async def test_store_of_another_version_is_named() -> None:
    async def answer(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await body_from(reader)
        writer.write(frame_of({"multiworld": 99, "ok": False}))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, WorldManager(config=LONG) as manager:
        with pytest.raises(ProtocolVersionError) as caught:
            await manager.join("w", rank=1, size=2, store=f"tcp://127.0.0.1:{port}")
        assert (caught.value.ours, caught.value.theirs) == (
            frames.PROTOCOL_VERSION,
            99,
        )


async def test_member_of_another_version_is_named_to_those_who_wait(
    server: StoreServer, store: str
) -> None:
    host, _, port = store.removeprefix("tcp://").partition(":")
    async with WorldManager(config=LONG) as manager:
        waiting = asyncio.ensure_future(manager.join("w", rank=0, size=2, store=store))
        await one_waits(server)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frame_of({"multiworld": 99, "world": "w"}))
        answer = msgspec.json.decode(await body_from(reader), type=Answer)
        assert answer.multiworld == frames.PROTOCOL_VERSION
        assert not answer.ok
        writer.close()
        with pytest.raises(ProtocolVersionError, match="speaks version 99"):
            await waiting


async def test_port_of_another_service_is_named() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, WorldManager(config=LONG) as manager:
        for rank in (0, 1):
            with pytest.raises(ProtocolVersionError, match="not a multiworld store"):
                await manager.join(
                    "w", rank=rank, size=2, store=f"tcp://127.0.0.1:{port}"
                )


async def test_garbage_on_the_store_disturbs_nobody(store: str) -> None:
    host, _, port = store.removeprefix("tcp://").partition(":")
    async with WorldManager() as one, WorldManager() as two:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\xff" * 64, b""):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(garbage)
            writer.close()
        await pair(one, two, "w", store)


async def test_cancelled_join_leaves_nothing_behind(
    server: StoreServer, store: str
) -> None:
    async with WorldManager() as one, WorldManager() as two, WorldManager() as three:
        joining = asyncio.ensure_future(one.join("w", rank=0, size=2, store=store))
        await one_waits(server)
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        assert one.worlds == {}
        await pair(two, three, "w", store)
        await pair(one, two, "v", store)


async def test_join_when_the_manager_closes_then_it_says_so(
    server: StoreServer, store: str
) -> None:
    """It raises its own error, not a cancellation."""
    manager = WorldManager()
    joining = asyncio.ensure_future(manager.join("w", rank=0, size=2, store=store))
    await one_waits(server)
    await manager.close()
    with pytest.raises(WorldClosedError, match="closed"):
        await joining


async def test_member_that_gives_up_before_its_links_fails_the_others_at_once(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store informs them, as there is no link that could end."""
    async with WorldManager(config=LONG) as one, WorldManager(config=LONG) as two:
        with monkeypatch.context() as patch:
            kind, admitted = type(two.watchdog), asyncio.Event()
            attach = kind.attach

            def stuck(self: Any, *args: Any) -> Coroutine[Any, Any, None]:
                if self is not two.watchdog:
                    return attach(self, *args)
                admitted.set()
                return asyncio.sleep(60.0)

            patch.setattr(kind, "attach", stuck)
            joins = [
                asyncio.ensure_future(manager.join("w", rank=rank, size=2, store=store))
                for rank, manager in enumerate((one, two))
            ]
            await admitted.wait()
            joins[1].cancel()
            async with asyncio.timeout(5):
                with pytest.raises(WorldBrokenError, match="gave up"):
                    await joins[0]
        await asyncio.gather(*joins, return_exceptions=True)
        await pair(one, two, "w", store)


async def test_member_that_gives_up_while_joining_fails_the_others_at_once(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with WorldManager(config=LONG) as one, WorldManager(config=LONG) as two:
        with monkeypatch.context() as patch:
            never, reached = asyncio.Event(), asyncio.Event()

            stuck_ones: list[object] = []

            def stuck(*which: object) -> Coroutine[Any, Any, bool]:
                stuck_ones.append(which)
                if len(stuck_ones) == 2:  # both are linked by now
                    reached.set()
                return never.wait()

            patch.setattr(type(two.watchdog), "lane", stuck)
            joins = [
                asyncio.ensure_future(manager.join("w", rank=rank, size=2, store=store))
                for rank, manager in enumerate((one, two))
            ]
            await reached.wait()
            joins[1].cancel()
            async with asyncio.timeout(5):
                with pytest.raises(WorldBrokenError, match="gave up"):
                    await joins[0]
        await asyncio.gather(*joins, return_exceptions=True)
        await pair(one, two, "w", store)


async def test_closed_worlds_leave_no_names(store: str) -> None:
    async with WorldManager() as one, WorldManager() as two:
        for number in range(5):
            name = f"w{number}"
            await pair(one, two, name, store)
            await asyncio.gather(one.world(name).close(), two.world(name).close())
        assert one.worlds == two.worlds == {}


async def test_second_join_is_refused_and_the_world_continues(store: str) -> None:
    async with WorldManager() as one, WorldManager() as two:
        joining = asyncio.ensure_future(one.join("w", rank=0, size=2, store=store))
        await asyncio.sleep(0)
        with pytest.raises(WorldExistsError, match="is joining"):
            await one.join("w", rank=0, size=2, store=store)
        await two.join("w", rank=1, size=2, store=store)
        world = await joining
        with pytest.raises(WorldExistsError, match="close it"):
            await one.join("w", rank=0, size=2, store=store)
        await world.send(torch.ones(1), dst=1)
        await two.world("w").recv(src=0)


async def test_closed_world_can_be_joined_again(store: str) -> None:
    async with WorldManager() as one, WorldManager() as two:
        for epoch in (1, 2, 3):
            await pair(one, two, "w", store)
            assert one.world("w").epoch == epoch
            if epoch == 1:
                await one.world("w").close()
                await two.leave("w")
            else:
                one.remove_world("w")
                two.remove_world("w")


async def test_bad_arguments_are_named_before_any_io(store: str) -> None:
    async with WorldManager() as manager:
        for name, rank, size, address, backend, device in (
            ("", 0, 2, store, "direct", "cpu"),
            ("w", 2, 2, store, "direct", "cpu"),
            ("w", -1, 2, store, "direct", "cpu"),
            ("w", 0, 0, store, "direct", "cpu"),
            ("w", 0, 2, "nowhere", "direct", "cpu"),
            ("w", 0, 2, store, "carrier-pigeon", "cpu"),
            ("w", 0, 2, store, "memory", "cpu"),
            ("w", 0, 2, "memory://x", "direct", "cpu"),
            ("w", 0, 2, store, "direct", "cuda"),
            ("w", 0, 2, store, "nccl", "cpu"),
        ):
            with pytest.raises(ConfigError):
                await manager.join(
                    name,
                    rank=rank,
                    size=size,
                    store=address,
                    backend=backend,
                    device=device,
                )
        with pytest.raises(UnknownWorldError, match="join it first"):
            manager.world("w")
        with pytest.raises(UnknownWorldError):
            await manager.communicator.send(torch.ones(1), 1, "w")
        with pytest.raises(UnknownWorldError):
            manager.remove_world("w")
        manager.add_world("w", "gloo")
        with pytest.raises(ValueError, match="already"):
            manager.add_world("w", "gloo")
        manager.remove_world("w")
    with pytest.raises(WorldClosedError):
        await manager.join("w", rank=0, size=1, store=store)


async def test_joining_disturbs_no_traffic(store: str, fork_server: None) -> None:
    async with ProcessFleet() as fleet, WorldManager() as one, WorldManager() as two:
        child = fleet.start(bodies.echo, "busy", store, "direct")
        busy = await one.join("busy", rank=0, size=2, store=store)
        await child.report()
        async with Traffic(busy) as traffic:
            for number in range(10):
                await pair(one, two, f"w{number}", store)
                await traffic.advances(3)
                await one.leave(f"w{number}")
                await two.leave(f"w{number}")
                await traffic.advances(3)


async def test_world_of_one(store: str) -> None:
    async with WorldManager() as manager:
        for backend in ("direct", "gloo"):
            world = await manager.join(
                backend, rank=0, size=1, store=store, backend=backend
            )
            assert torch.equal(await world.all_reduce(torch.ones(2)), torch.ones(2))
            assert len(await world.all_gather(torch.ones(2))) == 1
            await world.barrier()


async def test_world_joined_after_a_failed_heartbeat_helper_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link that never sends heartbeats would break each world that uses it."""
    config = WorldConfig(join_s=5, silence_s=1.0, heartbeat="process")
    async with Arena("direct", config) as arena:
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/no/python")
            with pytest.raises((MultiWorldError, OSError)):
                await arena.world(2, "first")
        world, _ = await arena.world(2, "second")
        over = asyncio.ensure_future(world.wait_over())
        done, _ = await asyncio.wait((over,), timeout=3.0)
        assert not done
        over.cancel()


async def test_join_that_is_cancelled_as_it_completes_leaves_nothing_behind() -> None:
    """The caller cannot know of the world, so it must not stay a member."""
    async with WorldManager(config=LONG) as one, WorldManager(config=LONG) as other:
        store = "memory://cancelled"
        joining = asyncio.create_task(
            one.join("w", rank=0, size=2, store=store, backend="memory")
        )

        async def cancel() -> None:
            async for event in one.events():
                if isinstance(event, WorldReady):
                    joining.cancel()
                    return

        watching = asyncio.create_task(cancel())
        await asyncio.sleep(0)
        world = await other.join("w", rank=1, size=2, store=store, backend="memory")
        await asyncio.gather(watching, joining, return_exceptions=True)
        assert joining.cancelled()
        await until(lambda: world.left == {0})
        assert not one.worlds


async def test_leave_ends_a_loop_that_joins_again() -> None:
    """The previous world has ended, and the next one does not exist yet."""
    async with WorldManager(config=LONG) as one, WorldManager(config=LONG) as other:
        store, yielded = "memory://kept", set[World]()

        async def keep() -> None:
            async for world in one.keep(
                "w", rank=0, size=2, store=store, backend="memory"
            ):
                yielded.add(world)

        keeping = asyncio.create_task(keep())
        world = await other.join("w", rank=1, size=2, store=store, backend="memory")
        await until(lambda: bool(yielded))
        await world.close()
        await until(lambda: "w" not in one.worlds)
        await one.leave("w")
        async with asyncio.timeout(5):
            await keeping


async def test_leave_during_a_reform_is_reported_to_waiting_members() -> None:
    """Nobody cancelled the waiting task, so it gets an error of the library."""
    async with contextlib.AsyncExitStack() as stack:
        made = [WorldManager(config=LONG) for _ in range(3)]
        managers = [await stack.enter_async_context(each) for each in made]
        joins = (
            manager.join("w", rank=rank, size=3, store="memory://r", backend="memory")
            for rank, manager in enumerate(managers)
        )
        worlds = await asyncio.gather(*joins)
        await managers[2].close()
        await until(lambda: worlds[0].left == {2})
        reforming = asyncio.create_task(worlds[0].reform())
        await asyncio.sleep(0.1)
        await managers[0].leave("w")
        with pytest.raises(WorldClosedError, match="left world 'w' during"):
            await reforming


async def test_store_in_memory_is_of_one_event_loop() -> None:
    """Members in other threads would never meet it."""

    async def ask() -> None:
        async with WorldManager(config=SHORT) as manager:
            await manager.join(
                "w", rank=0, size=1, store="memory://here", backend="memory"
            )

    async with WorldManager(config=LONG) as one:
        store = "memory://here"
        world = await one.join("w", rank=0, size=1, store=store, backend="memory")
        with pytest.raises(RendezvousError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, ask())
        again = await one.join("x", rank=0, size=1, store=store, backend="memory")
        await again.close()
        await world.close()
