"""All-gather: every member of a world gets the tensors of all members."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Gather the tensors of all members on every member, in the order of ranks."""
    gathered = await world.all_gather(torch.tensor([world.rank, number]))
    values = [tensor.tolist() for tensor in gathered]
    assert values == [[rank, number] for rank in range(world.size)]
    return f"have {values}"


if __name__ == "__main__":
    run(__doc__, step)
