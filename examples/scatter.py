"""Scatter: rank 0 of each world sends a different tensor to each member."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Send each member its share of rank 0's tensors."""
    shares = None
    if world.rank == 0:
        shares = [torch.tensor([rank, number]) for rank in range(world.size)]
    share = torch.zeros(2, dtype=torch.int64)
    await world.scatter(share, shares, src=0)
    assert share.tolist() == [world.rank, number]
    return f"have {share.tolist()}"


if __name__ == "__main__":
    run(__doc__, step)
