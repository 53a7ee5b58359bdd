"""The members of each world add their tensors up at rank 0."""

from __future__ import annotations

import torch

from common import run
from multiworld import World


async def step(world: World, number: int) -> str:
    """Rank 0 has the sum afterwards; the others' tensors stay as they are."""
    tensor = torch.full((4,), float(world.rank + number))
    await world.reduce(tensor, dst=0)
    if world.rank == 0:
        total = sum(rank + number for rank in range(world.size))
        assert torch.equal(tensor, torch.full((4,), float(total)))
    return f"have {tensor.tolist()}"


if __name__ == "__main__":
    run(__doc__, step)
