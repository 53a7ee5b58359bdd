"""Replicas of several ranks: one process leads, the others compute beside it. Shell.

The leader (rank 0) is the replica that everybody else knows. It forks the others before
it starts anything, and they meet in a world of their own. Whatever the leader computes,
it shares first; every rank then runs its part, and they exchange tensors by the group's
collectives. The loss of any rank is the loss of the replica: the world breaks, the
leader ends, and the controller starts another one.
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
LEADER = 0


class RankGroup:
    """The collectives of a replica's ranks, for the model's thread; a ``Group``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = asyncio.get_running_loop()
        self.rank, self.size = world.rank, world.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place, and return it."""
        tensor.copy_(self._wait(self._all_reduce(tensor)))
        return tensor

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        # The model's thread is in inference mode, the loop's is not, and may write to
        # no tensor that was made there.
        return await self._world.all_reduce(tensor.clone())

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return everybody's ``tensor``, by rank."""
        return self._wait(self._world.all_gather(tensor))

    def share(self, batch: Tensors) -> None:
        """Give a batch to the other ranks; for the leader."""
        self._wait(self._share(batch))

    async def _share(self, batch: Tensors) -> None:
        others = range(1, self.size)
        await asyncio.gather(
            *(self._world.send_bundle(batch, dst=other) for other in others)
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def fork_ranks(count: int) -> int:
    """Fork the other ranks of a replica; return the rank of the process that returns.

    Nothing may run in this process yet: a fork copies no thread.
    """
    leader = os.getpid()
    for rank in range(1, count):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != leader:
                os._exit(1)  # it was lost before this was said
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

    Raises:
        JoinTimeoutError: A rank did not come.

    Cancellation: safe.
    """
    world_name = f"group:{name}"
    return await manager.join(
        world_name, rank=rank, size=size, store=store, config=config
    )


async def follow(world: World, runner: Executor, device: str) -> None:
    """Compute what the leader shares, until it leaves.

    Raises:
        WorldBrokenError: A rank was lost.

    Cancellation: what is computed goes on in its thread, for nobody.
    """
    await runner.load(StageContext(device=device, group=RankGroup(world)))
    with contextlib.suppress(MemberLeftError):
        while True:
            bundle = await world.recv_bundle(src=LEADER)
            try:
                await runner.compute(bundle.tensors)
            except ServeError as error:
                # The leader's part has raised as well, and answers with it.
                logger.info("rank %d: %s", world.rank, error)
