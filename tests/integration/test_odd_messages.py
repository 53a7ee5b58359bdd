"""Messages, tensors and handlers that once broke a world, or hid the cause."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from multiworld import (
    ConfigError,
    MemberLostError,
    TensorMismatchError,
    World,
    WorldConfig,
    WorldManager,
    blocking,
)
from multiworld.backends.direct.backend import DirectBackend
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Arena, ProcessFleet, Role
from tests.ports import free_port
from tests.until import until

HANG_S = 20.0


@pytest.mark.parametrize("elements", [1, 2, 7, 8, 9, 13, 14, 30])
async def test_two_announcements_of_memory_in_one_read(elements: int) -> None:
    """The end of a read cuts the first one, and each passes a descriptor."""
    sizes = (25_600, 25_600, elements, 262_144, 300_000)
    async with Arena("direct") as arena, asyncio.timeout(HANG_S):
        left, right = await arena.world(2)
        for size in sizes:
            await left.send(torch.full((size,), float(size)), dst=1)
        for size in sizes:
            assert torch.equal(await right.recv(src=0), torch.full((size,), size))


async def test_message_of_a_cancelled_receive_comes_before_later_ones() -> None:
    """A later receive of the tag finds the next message in the same read."""
    store = f"tcp://127.0.0.1:{free_port()}"
    config = WorldConfig(shared_memory_bytes=0)
    go, sent, end = threading.Event(), threading.Event(), threading.Event()

    def sender() -> None:
        with blocking.WorldManager(config=config) as manager:
            world = manager.join("w", rank=0, size=2, store=store)
            go.wait(HANG_S)
            for number, size in ((1, 270_000), (2, 1000), (3, 1000)):
                world.send(torch.full((size,), number, dtype=torch.uint8), dst=1)
            sent.set()
            end.wait(HANG_S)

    thread = threading.Thread(target=sender)
    thread.start()
    async with asyncio.timeout(HANG_S), WorldManager(config=config) as manager:
        world = await manager.join("w", rank=1, size=2, store=store)
        go.set()
        sent.wait(HANG_S)
        first = asyncio.ensure_future(world.recv(src=0))
        await asyncio.sleep(0)
        found = [await world.recv(src=0)]
        first.cancel()
        got = await asyncio.gather(first, return_exceptions=True)
        found = [each for each in got if isinstance(each, Tensor)] + found
        while len(found) < 3:
            found.append(await world.recv(src=0))
        assert [int(each[0]) for each in found] == [1, 2, 3]
        end.set()
    thread.join(HANG_S)


@pytest.mark.parametrize("backend", ["direct", "gloo", "memory"])
async def test_tensor_without_memory_is_refused(backend: str) -> None:
    """Reading the memory it points to would crash the process."""
    async with Arena(backend) as arena, asyncio.timeout(HANG_S):
        left, right = await arena.world(2)
        stand = AsyncCollectiveTensor(torch.ones(8))
        for call in (
            left.send(stand, dst=1),
            left.recv(stand, src=1),
            left.send_bundle({"x": stand}, dst=1),
            left.all_reduce(stand),
        ):
            with pytest.raises(TensorMismatchError, match="without memory"):
                await call
        await left.send(torch.ones(3), dst=1)
        assert torch.equal(await right.recv(src=0), torch.ones(3))


@pytest.mark.parametrize("backend", ["direct", "gloo", "memory"])
async def test_arguments_that_cannot_be_carried_out_break_nothing(backend: str) -> None:
    """Too many dimensions, and results that overlap themselves."""
    async with Arena(backend) as arena, asyncio.timeout(HANG_S):
        left, right = await arena.world(2)
        for sent in (torch.ones((1,) * 65), torch.ones((1,) * 64 + (100_000,))):
            with pytest.raises(TensorMismatchError, match="65 dimensions"):
                await left.send(sent, dst=1)
        wide = torch.tensor(3.0).expand(4)
        for call in (
            left.all_reduce(wide),
            left.broadcast(wide, src=1),
            left.reduce(wide, dst=0),
            left.scatter(wide, src=1),
        ):
            with pytest.raises(TensorMismatchError, match="overlaps itself"):
                await call
        await asyncio.gather(
            left.broadcast(wide, src=0), right.broadcast(found := torch.zeros(4), src=0)
        )
        assert torch.equal(found, torch.full((4,), 3.0))


async def test_handler_that_raises_ends_nothing() -> None:
    """It must not raise, but other worlds and later messages must not suffer."""
    async with Arena("direct") as arena, asyncio.timeout(HANG_S):
        left, right = await arena.world(2)
        heard: list[float] = []

        def handler(tensor: Tensor) -> None:
            heard.append(float(tensor[0]))
            if len(heard) == 1:
                raise RuntimeError("a fault of the program")

        right.handle(handler, src=0, tag=1)
        for number in range(3):
            await left.send(torch.tensor([float(number)]), dst=1, tag=1)
        await left.send(torch.ones(1), dst=1)
        assert await right.recv(src=0) == 1.0
        await until(lambda: heard == [0.0, 1.0, 2.0])


async def member(role: Role, store: str, names: list[str]) -> None:
    async with WorldManager(config=WorldConfig(join_s=20)) as manager:
        for name in names:
            await manager.join(name, rank=1, size=2, store=store)
        role.report("joined")
        await asyncio.sleep(600)


@asynccontextmanager
async def worlds_with_a_lost_member(
    names: list[str], prepare: Callable[[list[World]], None]
) -> AsyncIterator[tuple[WorldManager, list[World]]]:
    """Return worlds whose other member was killed after ``prepare``."""
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    async with ProcessFleet() as fleet, WorldManager() as manager:
        child = fleet.start(member, store, names)
        worlds = [
            await manager.join(name, rank=0, size=2, store=store) for name in names
        ]
        assert await child.report(HANG_S) == "joined"
        prepare(worlds)
        child.kill()
        async with asyncio.timeout(HANG_S):
            yield manager, worlds
    await server.close()


async def test_error_as_one_world_breaks_leaves_the_others_informed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abort, aborted = DirectBackend.abort, list[DirectBackend]()
    receiving: list[asyncio.Task[Tensor]] = []

    def fails(self: DirectBackend) -> None:
        aborted.append(self)
        if len(aborted) == 1:
            raise RuntimeError("no thread can be started")
        abort(self)

    def prepare(worlds: list[World]) -> None:
        receiving.extend(asyncio.ensure_future(w.recv(src=1)) for w in worlds)
        monkeypatch.setattr(DirectBackend, "abort", fails)

    names = ["a", "b", "c"]
    async with worlds_with_a_lost_member(names, prepare) as (_, worlds):
        for world in worlds:
            await world.wait_over()
            assert world.is_broken
        await until(lambda: sum(task.done() for task in receiving) >= 2)
    for task in receiving:
        task.cancel()
    found = await asyncio.gather(*receiving, return_exceptions=True)
    assert sum(isinstance(error, MemberLostError) for error in found) >= 2


async def test_broken_world_that_is_closed_is_forgotten() -> None:
    async with worlds_with_a_lost_member(["a"], lambda _: None) as (manager, worlds):
        await worlds[0].wait_over()
        assert list(manager.worlds) == ["a"]
        await worlds[0].close()
        assert manager.worlds == {}


async def test_exchange_of_nothing_leaves_a_world_usable() -> None:
    """This happens when no token goes to an expert of another member."""
    async with Arena("gloo") as arena, asyncio.timeout(HANG_S):
        worlds = await arena.world(2)
        ins = [[torch.empty(0), torch.empty(0)] for _ in worlds]
        outs = [[torch.empty(0), torch.empty(0)] for _ in worlds]
        await asyncio.gather(
            *(w.all_to_all(*given) for w, *given in zip(worlds, outs, ins, strict=True))
        )
        assert all(world.is_ready for world in worlds)


async def test_message_is_received_into_a_leaf_that_requires_grad() -> None:
    """Parameters are such leaves."""
    config = WorldConfig(join_s=20.0, host_p2p="backend")
    async with Arena("gloo", config) as arena, asyncio.timeout(HANG_S):
        left, right = await arena.world(2)
        leaf = torch.zeros(3, requires_grad=True)
        await asyncio.gather(left.send(torch.ones(3), dst=1), right.recv(leaf, src=0))
        assert leaf.tolist() == [1.0, 1.0, 1.0]


async def test_wrong_arguments_are_named() -> None:
    async with Arena("memory") as arena:
        left, _ = await arena.world(2)
        with pytest.raises(ConfigError, match="rank is None"):
            left.handle(lambda tensor: None, src=None)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="meta"):
            await left.send_bundle({}, dst=1, meta=[1])  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="tensors"):
            await left.send_bundle([1], dst=1)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="a int"):
            await left.send_object(10**5000, dst=1)
