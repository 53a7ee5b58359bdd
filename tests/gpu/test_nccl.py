"""Operations and faults of NCCL worlds, on at least one GPU."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from multiworld import MemberLostError, World, WorldConfig, WorldManager
from multiworld.errors import WorldBrokenError, WorldClosedError
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Child, ProcessFleet, Role

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(180),
]
CONFIG = WorldConfig(join_s=60)
NOTICE_S = 30.0


async def member(
    role: Role, store: str, host_id: str, places: dict[str, tuple[int, int]]
) -> None:
    # Ranks share a GPU. With host ids of their own, NCCL takes them for different hosts
    # and uses sockets: enough to test faults, but not to measure bandwidth.
    os.environ.update(NCCL_HOSTID=host_id, NCCL_SOCKET_IFNAME="lo")
    async with WorldManager(config=CONFIG) as manager:
        names = list(places)
        joined = await asyncio.gather(
            *(
                manager.join(
                    name,
                    rank=places[name][0],
                    size=places[name][1],
                    store=store,
                    backend="nccl",
                    device="cuda",
                )
                for name in names
            )
        )
        worlds = dict(zip(names, joined, strict=True))
        role.report("ready")
        while True:
            name, order = await role.order()
            if name == "join":
                worlds[order] = await manager.join(
                    order,
                    rank=places[order][0],
                    size=places[order][1],
                    store=store,
                    backend="nccl",
                    device="cuda",
                )
                role.report("ready")
                continue
            role.report(await _tried(worlds[name], order))


async def _tried(world: World, order: str) -> Any:
    tensor = torch.full((1024,), float(world.rank + 1), device="cuda")
    try:
        match order:
            case "all_reduce":
                await world.all_reduce(tensor)
            case "large all_reduce":
                big = torch.ones(16_000_000, device="cuda")
                while True:
                    await world.all_reduce(big)
            case "recv":
                tensor = await world.recv(src=(world.rank + 1) % world.size)
            case "send":
                await world.send(tensor, dst=(world.rank - 1) % world.size)
            case "barrier":
                await world.barrier()
            case "idle":
                await world.wait_over()
                await world.barrier()
    except (WorldBrokenError, WorldClosedError) as error:
        return error
    return tensor[0].item()


class Cast:
    """Three processes; all are in ``w``, and the first and the third in ``other``."""

    def __init__(self, fleet: ProcessFleet, store: str) -> None:
        self.fleet, self.store = fleet, store

    async def settle(self) -> list[Child]:
        places = [
            {"w": (0, 3), "other": (0, 2)},
            {"w": (1, 3)},
            {"w": (2, 3), "other": (1, 2)},
        ]
        children = [
            self.fleet.start(member, self.store, f"host{number}", mine)
            for number, mine in enumerate(places)
        ]
        for child in children:
            assert await child.report(120) == "ready"
        return children


@pytest.fixture
async def cast(fork_server: None) -> AsyncIterator[Cast]:
    async with AsyncExitStack() as stack:
        server = await StoreServer.listen("127.0.0.1", 0)
        stack.push_async_callback(server.close)
        fleet = await stack.enter_async_context(ProcessFleet())
        yield Cast(fleet, f"tcp://127.0.0.1:{server.port}")


async def both(children: list[Child], name: str, *orders: str) -> list[Any]:
    for child, order in zip(children, orders, strict=True):
        child.order((name, order))
    return [await child.report(NOTICE_S) for child in children]


async def test_operations_on_device_tensors(cast: Cast) -> None:
    children = await cast.settle()
    assert await both(children, "w", *["all_reduce"] * 3) == [6.0] * 3
    assert await both([children[0], children[1]], "w", "recv", "send") == [2.0, 2.0]
    pair = [children[0], children[2]]
    assert await both(pair, "other", "all_reduce", "all_reduce") == [3.0, 3.0]


@pytest.mark.parametrize("mode", ["kill", "stop"])
@pytest.mark.parametrize(
    "phase", ["idle", "all_reduce", "large all_reduce", "recv", "barrier"]
)
async def test_lost_member_is_named_and_the_other_world_continues(
    cast: Cast, phase: str, mode: str
) -> None:
    """Survivors that share a device and another world get right results there."""
    children = await cast.settle()
    pair, victim = [children[0], children[2]], children[1]
    for child in pair:
        child.order(("w", phase))
    victim.kill() if mode == "kill" else victim.stop()
    for child in pair:
        error = await child.report(NOTICE_S)
        assert isinstance(error, MemberLostError), error
        assert error.rank == 1
    for _ in range(20):
        assert await both(pair, "other", "all_reduce", "all_reduce") == [3.0, 3.0]
    victim.end()
    replacement = cast.fleet.start(member, cast.store, "host3", {"w": (1, 3)})
    for child in pair:
        child.order(("join", "w"))
    for child in (*pair, replacement):
        assert await child.report(120) == "ready"
    trio = [pair[0], replacement, pair[1]]
    assert await both(trio, "w", *["all_reduce"] * 3) == [6.0] * 3
