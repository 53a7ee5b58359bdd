"""NCCL worlds, on a machine with a GPU. Not run where this was written."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch

from multiworld import MemberLostError, WorldConfig, WorldManager
from multiworld.rendezvous.server import StoreServer
from multiworld.testing import ProcessFleet, Role

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
CONFIG = WorldConfig(join_s=60)


async def nccl_member(role: Role, store: str) -> None:
    """Rank 1, on the same GPU as rank 0; as between hosts, over sockets."""
    os.environ.update(NCCL_HOSTID="one", NCCL_SOCKET_IFNAME="lo")
    async with WorldManager(config=CONFIG) as manager:
        world = await manager.join(
            "w", rank=1, size=2, store=store, backend="nccl", device="cuda"
        )
        tensor = torch.ones(4, device="cuda")
        await world.all_reduce(tensor)
        await world.send(tensor, dst=0)
        role.report("ready")
        await world.all_reduce(tensor)


async def test_nccl_world_sends_reduces_and_names_the_lost(
    fork_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device tensors both ways; then the member is killed in a collective."""
    monkeypatch.setenv("NCCL_HOSTID", "zero")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    server = await StoreServer.listen("127.0.0.1", 0)
    store = f"tcp://127.0.0.1:{server.port}"
    async with ProcessFleet() as fleet, WorldManager(config=CONFIG) as manager:
        child = fleet.start(nccl_member, store)
        world = await manager.join(
            "w", rank=0, size=2, store=store, backend="nccl", device="cuda"
        )
        tensor = torch.ones(4, device="cuda")
        await world.all_reduce(tensor)
        assert tensor.tolist() == [2, 2, 2, 2]
        assert torch.equal(await world.recv(src=1), tensor)
        await child.report(60)
        pending = asyncio.ensure_future(world.recv(src=1))
        child.kill()
        with pytest.raises(MemberLostError):
            await pending
    await server.close()
