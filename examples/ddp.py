"""DistributedDataParallel inside a world: a member is lost, and training goes on.

    python examples/ddp.py

starts three members as processes; the last one kills itself half way. The others are
told who was lost, reform without it, and train on with equal weights.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from multiworld import MemberLostError, blocking

SIZE, STEPS, KILLED_AT = 3, 20, 8


def train() -> None:
    """Train as one member; rank, size and store come from the environment."""
    torch.manual_seed(7)
    model = nn.Linear(16, 1)
    step = 0
    with blocking.WorldManager() as manager:
        world = manager.join("training", backend="gloo")
        while step < STEPS:
            # Copies rank 0's weights to all: after a loss, all go on from the same.
            parallel = DistributedDataParallel(model, process_group=world.process_group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            try:
                while step < STEPS:
                    if (world.rank, world.size, step) == (SIZE - 1, SIZE, KILLED_AT):
                        os.kill(os.getpid(), signal.SIGKILL)
                    rows = torch.randn(32, 16)
                    optimizer.zero_grad()
                    with world.named_errors():
                        loss = (parallel(rows) - rows.sum(1, keepdim=True)).square()
                        loss.mean().backward()
                    optimizer.step()
                    step += 1
            except MemberLostError as error:
                print(f"rank {world.rank}, step {step}: rank {error.rank} was lost")
                world = world.reform()
                print(f"rank {world.rank} continues in a world of {world.size}")
        weights = world.all_gather(model.weight.detach().clone())
        is_equal = all(torch.equal(one, weights[0]) for one in weights)
        print(f"rank {world.rank}: {step} steps, equal weights: {is_equal}")


def launch() -> int:
    """Start the members; return 0 if all but the killed one end well."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    members = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(SIZE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(SIZE)
    ]
    try:
        codes = [member.wait(timeout=120) for member in members]
    finally:
        for member in members:
            member.kill()
    return 0 if codes == [0] * (SIZE - 1) + [-signal.SIGKILL] else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(launch())
