"""The event loop: it is never blocked, nothing spins, and many worlds cost little."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
import torch
from blockbuster import BlockBuster

from multiworld import World, WorldConfig, WorldManager
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Arena, ProcessFleet, no_leaks
from tests import bodies
from tests.traffic import Traffic

SLOW_S = 0.25
"""Seconds above which a callback counts as slow: it holds up every other world."""


TRIES = 3
"""Runs of which one must have no slow callback: others may have lost their core."""


@pytest.mark.parametrize("backend", ["memory", "direct", "gloo"])
async def test_no_callback_is_slow(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_debug(True)
    loop.slow_callback_duration = SLOW_S
    found: list[list[str]] = []
    while len(found) < TRIES and [] not in found:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "asyncio"):
            await _operate(backend)
        messages = [record.getMessage() for record in caplog.records]
        found.append([text for text in messages if "took" in text])
    assert [] in found, found


async def _operate(backend: str) -> None:
    big, other = torch.ones(20_000_000), torch.ones(20_000_000)  # 80 MB each
    strided = torch.empty(2, 10_000_000).t()
    async with Arena(backend) as arena:
        left, right = await arena.world(2)
        await asyncio.gather(left.send(big, dst=1), right.recv(src=0))
        await asyncio.gather(
            left.send(big.view(2, -1).t(), dst=1),
            right.recv(strided, src=0),
        )
        await asyncio.gather(left.all_reduce(big), right.all_reduce(other))
        await asyncio.gather(_send_many(left), _receive_many(right))


async def _send_many(world: World) -> None:
    tiny = torch.ones(4)
    for _ in range(3000):
        await world.send(tiny, dst=1)


async def _receive_many(world: World) -> None:
    for _ in range(3000):
        await world.recv(src=0)


async def test_no_blocking_call_on_the_loop() -> None:
    blocker = BlockBuster()
    for allowed in ("os.stat", "os.listdir", "io.TextIOWrapper.read", "os.readlink"):
        # reads of /proc and the helper's start touch memory, not disks
        if allowed in blocker.functions:
            blocker.functions.pop(allowed)
    async with Arena("direct") as arena:
        await arena.world(2)  # the first one starts the helper processes
        blocker.activate()
        try:
            left, right = await arena.world(2)
            await asyncio.gather(left.send(torch.ones(9), dst=1), right.recv(src=0))
            await asyncio.gather(left.barrier(), right.barrier())
            await left.close()
        finally:
            blocker.deactivate()


async def test_busy_sender_gives_way_to_other_tasks() -> None:
    async with Arena("direct") as arena:
        left, right = await arena.world(2)
        lateness: list[float] = []

        async def tick() -> None:
            while True:
                began = time.monotonic()
                await asyncio.sleep(0)
                lateness.append(time.monotonic() - began)

        async def send() -> None:
            tensor = torch.ones(1024)
            for _ in range(5000):
                await left.send(tensor, dst=1)

        async def receive() -> None:
            for _ in range(5000):
                await right.recv(src=0)

        ticking = asyncio.ensure_future(tick())
        await asyncio.gather(send(), receive())
        ticking.cancel()
        assert len(lateness) > 50
        assert max(lateness) < SLOW_S


async def test_idle_worlds_use_no_processor(fork_server: None) -> None:
    """Waiting worlds do not poll."""
    async with Arena("direct") as arena:
        left, right = await arena.world(2)
        waiting = [
            asyncio.ensure_future(left.recv(src=1)),
            asyncio.ensure_future(right.recv_any()),
            asyncio.ensure_future(left.barrier()),
        ]
        await asyncio.sleep(0.2)  # until the work that joining left over is done
        began = time.process_time()
        await asyncio.sleep(2)  # only the CPU time while nothing happens is measured
        used = time.process_time() - began
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert used < 0.5, "of 2 s; a loop that spins uses all of them"


async def test_two_hundred_worlds_between_two_processes(fork_server: None) -> None:
    """They share one link."""
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    count = 200
    async with (
        no_leaks(allow=("asyncio_", "forkserver")),
        ProcessFleet() as fleet,
        WorldManager() as manager,
    ):
        child = fleet.start(bodies.many, count, store)
        for number in range(count):
            await manager.join(f"w{number}", rank=0, size=2, store=store)
        assert await child.report() == "ready"
        assert manager.watchdog.link_count == 1
        for name in ("w0", f"w{count - 1}"):
            world = manager.world(name)
            await world.send(torch.ones(1), dst=1)
            await world.recv(src=1)
        over = [world.wait_over() for world in manager.worlds.values()]
        child.kill()
        async with asyncio.timeout(10):
            await asyncio.gather(*over)
        assert all(world.is_broken for world in manager.worlds.values())
    await server.close()


@pytest.mark.parametrize("backend", ["direct", "gloo"])
async def test_cycles_of_a_world_leave_nothing_behind(
    backend: str, fork_server: None
) -> None:
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    config = WorldConfig(join_s=20)
    async with ProcessFleet() as fleet, WorldManager(config=config) as manager:
        busy = fleet.start(bodies.echo, "busy", store, "direct")
        traffic = Traffic(await manager.join("busy", rank=0, size=2, store=store))
        await busy.report()
        child = fleet.start(bodies.cycles, "w", 60, store, backend)
        async with traffic:
            await _cycle(manager, 10, store, backend)
            async with no_leaks(allow=("asyncio_",)):
                await _cycle(manager, 50, store, backend)
            await traffic.advances()
        await child.done()
    await server.close()


async def _cycle(manager: WorldManager, count: int, store: str, backend: str) -> None:
    for _ in range(count):
        world = await manager.join("w", rank=0, size=2, store=store, backend=backend)
        await world.send(torch.ones(3), dst=1)
        await world.recv(src=1)
        await world.barrier()
        await manager.leave("w")
