"""Broadcast: rank 0 of each world sends one tensor to all members."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Copy rank 0's tensor to every member."""
    tensor = torch.full((4,), float(number)) if world.rank == 0 else torch.zeros(4)
    await world.broadcast(tensor, src=0)
    assert torch.equal(tensor, torch.full((4,), float(number)))
    return f"have {tensor.tolist()}"


if __name__ == "__main__":
    run(__doc__, step)
