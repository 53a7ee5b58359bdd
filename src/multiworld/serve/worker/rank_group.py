"""Replicas of several ranks, one process each. Shell.

To other processes, the leader (rank 0) is the replica. It forks the other ranks before
it starts anything else, and they join a world of their own. The leader sends each batch
to the other ranks; then every rank computes its part, and they exchange tensors by the
group's collectives. The loss of any rank is the loss of the replica: the world breaks,
the leader exits, and the controller starts another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch
from torch import Tensor

from multiworld.config import WorldConfig
from multiworld.errors import MemberLeftError, ServeError
from multiworld.serve.spec.stage import StageContext, Tensors
from multiworld.serve.worker.executor import Executor
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
"""Option of ``prctl``: the signal sent to a process when its parent dies."""

LEADER = 0
"""Rank of the leader."""


class RankGroup:
    """Collectives of a replica's ranks, for the model's thread; a ``Group``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = asyncio.get_running_loop()
        self.rank, self.size = world.rank, world.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place, and return it."""
        tensor.copy_(self._wait(self._all_reduce(tensor)))
        return tensor

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        # The loop's thread may not write to tensors made in inference mode, which the
        # model's thread is in.
        return await self._world.all_reduce(tensor.clone())

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the ``tensor`` of every rank, in the order of ranks."""
        return self._wait(self._world.all_gather(tensor))

    def share(self, batch: Tensors) -> None:
        """Send a batch to the other ranks; only the leader may call it."""
        self._wait(self._share(batch))

    async def _share(self, batch: Tensors) -> None:
        others = range(1, self.size)
        await asyncio.gather(
            *(self._world.send_bundle(batch, dst=other) for other in others)
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def fork_ranks(count: int) -> int:
    """Fork the other ranks of a replica; return the rank of the calling process.

    The process must have no other threads yet, because a fork does not copy them.
    """
    leader = os.getpid()
    for rank in range(1, count):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != leader:
                os._exit(1)  # the leader died before prctl
            random.seed()
            torch.seed()
            return rank
    return LEADER


async def join_group(
    manager: WorldManager,
    name: str,
    rank: int,
    size: int,
    store: str,
    config: WorldConfig,
) -> World:
    """Join the world of a replica's ranks.

    Args:
        manager: Manager that joins the world.
        name: Name of the replica.
        rank: Rank of this process.
        size: Number of ranks.
        store: Address of the store.
        config: Configuration of the world.

    Raises:
        JoinTimeoutError: A rank did not join in time.

    Cancellation: Safe. The join is withdrawn.
    """
    world_name = f"group:{name}"
    return await manager.join(
        world_name, rank=rank, size=size, store=store, config=config
    )


async def follow(world: World, runner: Executor, device: str) -> None:
    """Load the stage, and compute the leader's batches until it leaves.

    Args:
        world: World of the replica's ranks.
        runner: Executor of this rank.
        device: Device that the stage is loaded on.

    Raises:
        WorldBrokenError: A rank was lost.
        Exception: Any error that loading the stage raises.

    Cancellation: Safe. A running computation goes on in its thread; its result is
        dropped.
    """
    await runner.load(StageContext(device=device, group=RankGroup(world)))
    with contextlib.suppress(MemberLeftError):
        while True:
            bundle = await world.recv_bundle(src=LEADER)
            try:
                await runner.compute(bundle.tensors)
            except ServeError as error:
                # The leader's part raised, too; it answers with its error.
                logger.info("rank %d: %s", world.rank, error)
