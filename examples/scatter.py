"""Rank 0 of each world gives each member a tensor of its own."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Each member has its share afterwards."""
    shares = None
    if world.rank == 0:
        shares = [torch.tensor([rank, number]) for rank in range(world.size)]
    share = torch.zeros(2, dtype=torch.int64)
    await world.scatter(share, shares, src=0)
    assert share.tolist() == [world.rank, number]
    return f"have {share.tolist()}"


if __name__ == "__main__":
    run(__doc__, step)
