"""Send and receive: a leader in several worlds receives from the worker of each."""

from __future__ import annotations

import torch

from common import run
from multiworld import World

LEADER = 0


async def step(world: World, number: int) -> str:
    """Send to the leader or, as the leader, receive from every worker of this world."""
    if world.rank != LEADER:
        tensor = torch.full((4,), float(world.rank * 1000 + number))
        await world.send(tensor, dst=LEADER)
        return f"sent {tensor[0]:.0f}"
    received = [await world.recv(src=rank) for rank in range(1, world.size)]
    return f"received {[int(tensor[0]) for tensor in received]}"


if __name__ == "__main__":
    run(__doc__, step)
