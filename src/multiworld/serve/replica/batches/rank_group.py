"""Replicas of several ranks, one process each.

To other processes, the leader (rank 0) is the replica. The leader forks the other ranks
before it starts anything else (on Ray, each rank is launched by itself), and all ranks
of the replica join one world. The leader sends each batch to the other ranks; then
every rank computes its part, and the ranks exchange tensors through the group's
collectives. The loss of any rank is the loss of the replica: the world breaks, the
leader exits, and the controller starts another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import random
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch
from torch import Tensor

from multiworld.config import WorldConfig
from multiworld.errors import MemberLeftError, MultiWorldError, ServeError
from multiworld.serve.replica.batches.executor import Executor
from multiworld.serve.spec.stage import StageContext, Tensors
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")

T = TypeVar("T")

# Option of ``prctl``: the signal to this process when its parent dies.
PR_SET_PDEATHSIG = 1

LEADER = 0

FAILED = 1  # tag of reports of failed batches; batches themselves have tag 0
SETTLED = 2  # tag of replies to the leader's reports


class RankGroup:
    """Collectives of a replica's ranks, for the model's thread; implements ``Group``.

    If a rank's part of a batch fails, the rank reports how many collectives it has
    begun. A rank that has begun more, or begins more later, cancels its collective,
    which breaks the world. Otherwise the collective would match one of a later batch,
    and answers would be wrong.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = asyncio.get_running_loop()
        self.rank, self.size = world.rank, world.size
        self._batch = 0
        self._begun = 0
        self._running: asyncio.Task[Any] | None = None
        self._limits: dict[int, int] = {}
        self._ended = asyncio.Condition()
        self._ended_batch = 0
        # The leader and each other rank report to each other; other ranks do not.
        self._peers = range(1, self.size) if self.rank == LEADER else [LEADER]
        self._watching = [
            self._loop.create_task(self._watch(peer), name="multiworld rank group")
            for peer in self._peers
        ]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place, and return it."""
        # Write the result here, not in the event loop's thread: ``tensor`` was made in
        # inference mode, and only this thread is in inference mode.
        tensor.copy_(self._wait(self._collective(self._all_reduce, tensor)))
        return tensor

    async def _all_reduce(self, tensor: Tensor) -> Tensor:
        return await self._world.all_reduce(tensor.clone())

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._wait(self._collective(self._world.all_gather, tensor))

    async def _collective(
        self, begin: Callable[[Tensor], Coroutine[Any, Any, T]], tensor: Tensor
    ) -> T:
        self._begun += 1
        task = self._running = self._loop.create_task(begin(tensor))
        if self._is_out_of_step():
            self._break(task)
        try:
            result: T = await task
            return result
        except asyncio.CancelledError:
            if task.cancelled():
                await self._world.wait_over()
                self._world.raise_if_over()
            raise
        finally:
            self._running = None

    def _break(self, collective: asyncio.Task[Any]) -> None:
        """Break the world by cancelling a collective once it has begun."""
        self._loop.call_soon(collective.cancel)

    def _is_out_of_step(self) -> bool:
        return self._begun > self._limits.get(self._batch, self._begun)

    async def _watch(self, peer: int) -> None:
        """Receive a rank's reports of failed batches, until the world ends."""
        with contextlib.suppress(MultiWorldError):
            while True:
                batch, begun = await self._world.recv_object(src=peer, tag=FAILED)
                self._limits[batch] = begun
                if self._is_out_of_step() and self._running is not None:
                    logger.error(
                        "rank %d began more collectives than rank %d, whose part of "
                        "the batch failed; breaking their world",
                        self.rank,
                        peer,
                    )
                    self._break(self._running)
                if self.rank != LEADER:
                    await self._wait_ended(batch)
                    await self._world.send_object(batch, dst=LEADER, tag=SETTLED)

    async def _wait_ended(self, batch: int) -> None:
        async with self._ended:
            await self._ended.wait_for(lambda: self._ended_batch >= batch)

    def begin(self) -> None:
        """Begin the next batch; called on the event loop."""
        self._batch += 1
        self._begun = 0
        for batch in [batch for batch in self._limits if batch < self._batch]:
            del self._limits[batch]

    async def end(self, *, failed: bool) -> None:
        """Report the end of this rank's part of a batch, if the others need to know."""
        # If this is cancelled, a report may be missing, so the replica must exit.
        if failed:
            report = [self._batch, self._begun]
            for peer in self._peers:
                await self._world.send_object(report, dst=peer, tag=FAILED)
            # Once all ranks have replied, each has ended its part of the batch.
            if self.rank == LEADER:
                for peer in self._peers:
                    await self._world.recv_object(src=peer, tag=SETTLED)
        async with self._ended:
            self._ended_batch = self._batch
            self._ended.notify_all()

    def share(self, batch: Tensors) -> None:
        """Send the next batch to the other ranks; only the leader may call it."""
        self._wait(self._share(batch))

    async def _share(self, batch: Tensors) -> None:
        self.begin()
        sends = (self._world.send_bundle(batch, dst=peer) for peer in self._peers)
        await asyncio.gather(*sends)

    def settle(self) -> None:
        self._wait(self.end(failed=True))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def fork_ranks(count: int) -> int:
    """Fork the other ranks of a replica; return the rank of this process."""
    # Call this before any thread is started: a fork does not copy other threads.
    leader = os.getpid()
    for rank in range(1, count):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != leader:
                os._exit(1)  # the leader died before ``prctl`` was called
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
    group = f"group:{name}"
    return await manager.join(group, rank=rank, size=size, store=store, config=config)


async def follow(world: World, runner: Executor, device: str) -> None:
    """Load the stage, and compute the leader's batches until it leaves."""
    group = RankGroup(world)
    await runner.load(StageContext(device=device, group=group))
    with contextlib.suppress(MemberLeftError):
        while True:
            bundle = await world.recv_bundle(src=LEADER)
            group.begin()
            failed = False
            try:
                await runner.compute(bundle.tensors)
            except ServeError as error:
                # The leader learns only that this part failed. If the leader's part
                # also raised, the leader reports that error.
                logger.info(
                    "rank %d failed in its part of a batch: %s", world.rank, error
                )
                failed = True
            await group.end(failed=failed)
