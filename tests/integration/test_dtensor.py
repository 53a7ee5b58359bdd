"""A world's c10d group in torch's own functions, functional collectives and DTensor."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from multiworld import (
    MemberLostError,
    UnsupportedOperationError,
    World,
    WorldConfig,
    WorldManager,
)
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Arena, ProcessFleet, Role
from multiworld.testing.leaks import Leak

CONFIG = WorldConfig(join_s=20)

LATE_S = 2.5
"""Seconds between Gloo's limit for connecting and that for an operation."""


class Perceptron(nn.Module):
    """Two layers that tensor parallelism cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(x)))
        return result


def whole_and_cut(world: World) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = Perceptron()
    cut = Perceptron()
    cut.load_state_dict(whole.state_dict())
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return whole, parallelize_module(cut, world.device_mesh("tp"), plan)


def check_once(world: World) -> None:
    whole, cut = whole_and_cut(world)
    up = cut.up.weight  # type: ignore[union-attr]
    down = cut.down.weight  # type: ignore[union-attr]
    assert isinstance(up, DTensor)
    assert isinstance(down, DTensor)
    assert up.to_local().shape == (16 // world.size, 8)
    assert down.to_local().shape == (8, 16 // world.size)
    x = torch.ones(3, 8)
    assert torch.allclose(cut(x), whole(x), atol=1e-5)


async def tensor_parallel_member(role: Role, name: str, store: str) -> None:
    async with WorldManager(config=CONFIG) as manager:
        world = await manager.join(name, rank=1, size=2, store=store, backend="gloo")
        role.report(os.getpid())
        while (order := await role.order()) in ("pass", "late"):
            if order == "late":
                await asyncio.sleep(LATE_S)
            check_once(world)


async def test_tensor_parallel_layer_in_two_worlds(fork_server: None) -> None:
    """A tensor-parallel layer continues in one world when the other world breaks."""
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    async with ProcessFleet() as fleet, WorldManager(config=CONFIG) as manager:
        worlds, children = {}, {}
        for name in ("a", "b"):
            children[name] = fleet.start(tensor_parallel_member, name, store)
            worlds[name] = await manager.join(
                name, rank=0, size=2, store=store, backend="gloo"
            )
            await children[name].report()
        for name in ("a", "b", "a"):
            children[name].order("pass")
            check_once(worlds[name])
        children["a"].kill()
        await worlds["a"].wait_over()
        with pytest.raises(MemberLostError):
            _ = worlds["a"].process_group
        for order in ("pass", "late"):
            children["b"].order(order)
            check_once(worlds["b"])
        children["b"].order("end")
        await children["b"].done()
    await server.close()


async def test_torch_functions_take_the_group() -> None:
    async with Arena("gloo") as arena:
        (world,) = await arena.world(1)
        group = world.process_group
        assert world.process_group is group
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert dist.get_world_size(group) == 1
        assert torch.equal(all_reduce(tensor, "sum", group), torch.ones(2))
        mesh = world.device_mesh()
        assert mesh.mesh_dim_names == ("world",)
        assert mesh.size() == 1


async def test_worlds_without_a_group_say_so() -> None:
    async with Arena("memory") as arena:
        (world,) = await arena.world(1)
        with pytest.raises(UnsupportedOperationError, match="gloo"):
            _ = world.process_group
        with pytest.raises(UnsupportedOperationError):
            world.device_mesh()


@pytest.mark.heavy
async def test_thirty_worlds_leave_nothing_behind(fork_server: None) -> None:
    """Even worlds whose meshes are kept leave no thread or descriptor."""
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    kept = []
    async with ProcessFleet() as fleet, WorldManager(config=CONFIG) as manager:
        child = fleet.start(thirty_worlds, store)
        counts = []
        for number in range(30):
            world = await manager.join(
                f"w{number}", rank=0, size=2, store=store, backend="gloo"
            )
            check_once(world)
            kept.append(world.device_mesh())
            await world.barrier()
            await manager.leave(f"w{number}")
            now = Leak.now()
            counts.append((len(now.threads), len(now.descriptors)))
        await child.done()
        assert len(kept) == 30
        # one may be closing right now; a leak would leave thirty
        assert min(counts[-5:]) <= max(counts[:5]), counts
    await server.close()


async def thirty_worlds(role: Role, store: str) -> None:
    async with WorldManager(config=CONFIG) as manager:
        for number in range(30):
            world = await manager.join(
                f"w{number}", rank=1, size=2, store=store, backend="gloo"
            )
            check_once(world)
            await world.barrier()
            await manager.leave(f"w{number}")
