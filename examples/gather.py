"""Rank 0 of each world collects the members' tensors."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Rank 0 has everybody's tensor afterwards, by rank."""
    gathered = await world.gather(torch.tensor([world.rank, number]), dst=0)
    if gathered is None:
        return "gave mine"
    values = [tensor.tolist() for tensor in gathered]
    assert values == [[rank, number] for rank in range(world.size)]
    return f"have {values}"


if __name__ == "__main__":
    run(__doc__, step)
