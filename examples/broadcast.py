"""Rank 0 of each world sends the same tensor to all its members."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Everybody has rank 0's tensor afterwards."""
    tensor = torch.full((4,), float(number)) if world.rank == 0 else torch.zeros(4)
    await world.broadcast(tensor, src=0)
    assert torch.equal(tensor, torch.full((4,), float(number)))
    return f"have {tensor.tolist()}"


if __name__ == "__main__":
    run(__doc__, step)
