"""The members of each world collect each other's tensors."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Everybody has everybody's tensor afterwards, by rank."""
    gathered = await world.all_gather(torch.tensor([world.rank, number]))
    values = [tensor.tolist() for tensor in gathered]
    assert values == [[rank, number] for rank in range(world.size)]
    return f"have {values}"


if __name__ == "__main__":
    run(__doc__, step)
