"""Messages whose send has returned: they arrive, whatever becomes of their sender."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import torch

from multiworld import WorldBrokenError, WorldConfig, WorldManager
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import ProcessFleet, Role

SIZES = {4_000: 200, 40_000: 200, 400_000: 50, 4_000_000: 8}
"""Number of messages of each size, in bytes."""

HANG_S = 30.0


async def sender(role: Role, store: str, backend: str, size: int, fate: str) -> None:
    """Send all messages; then block the event loop, or be killed."""
    async with WorldManager(config=WorldConfig(join_s=30)) as manager:
        world = await manager.join("w", rank=1, size=2, store=store, backend=backend)
        for number in range(SIZES[size]):
            await world.send(torch.full((size // 4,), float(number)), dst=0)
        role.report("sent")
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # noqa: ASYNC251 - the test needs a blocked loop


@pytest.mark.parametrize("backend", ["direct", "gloo"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fate", ["computes", "killed"])
async def test_sent_messages_arrive(backend: str, size: int, fate: str) -> None:
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    async with ProcessFleet() as fleet, WorldManager() as manager:
        child = fleet.start(sender, store, backend, size, fate)
        world = await manager.join("w", rank=0, size=2, store=store, backend=backend)
        async with asyncio.timeout(HANG_S):
            for number in range(SIZES[size]):
                found = await world.recv(src=1)
                assert found.numel() == size // 4
                assert bool((found == number).all())
        assert await child.report(HANG_S) == "sent"
        if fate == "killed":
            async with asyncio.timeout(HANG_S):
                with pytest.raises(WorldBrokenError):
                    await world.recv(src=1)
    await server.close()


async def test_budget_for_held_messages_hides_none_from_a_broken_world() -> None:
    """The sends have returned, though only some had room when the sender was killed."""
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    config = WorldConfig(join_s=30, unexpected_bytes=100_000)
    async with ProcessFleet() as fleet, WorldManager(config=config) as manager:
        child = fleet.start(sender, store, "direct", 4_000, "killed")
        world = await manager.join("w", rank=0, size=2, store=store)
        assert await child.report(HANG_S) == "sent"
        async with asyncio.timeout(HANG_S):
            await world.wait_over()
            for number in range(SIZES[4_000]):
                assert (await world.recv(src=1))[0] == number
    await server.close()


async def test_late_receiver_still_gets_what_was_sent_before_the_loss() -> None:
    """The world is broken long before the first receive."""
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    async with ProcessFleet() as fleet, WorldManager() as manager:
        child = fleet.start(sender, store, "direct", 4_000, "killed")
        world = await manager.join("w", rank=0, size=2, store=store)
        assert await child.report(HANG_S) == "sent"
        async with asyncio.timeout(HANG_S):
            await world.wait_over()
            assert world.is_broken
            with pytest.raises(WorldBrokenError):
                await world.send(torch.ones(1), dst=1)
            with pytest.raises(WorldBrokenError):
                await world.recv(src=1, tag=7)
            for number in range(SIZES[4_000]):
                assert (await world.recv(src=1))[0] == number
            with pytest.raises(WorldBrokenError):
                await world.recv(src=1)
    await server.close()
