"""All-reduce: every member of a world gets the sum of all members' tensors."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Sum the tensors of all members on every member."""
    tensor = torch.full((4,), float(world.rank + number))
    await world.all_reduce(tensor)
    total = sum(rank + number for rank in range(world.size))
    assert torch.equal(tensor, torch.full((4,), float(total)))
    return f"have {tensor.tolist()}"


if __name__ == "__main__":
    run(__doc__, step)
