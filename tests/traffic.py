"""Traffic on a world that a test must not disturb."""

from __future__ import annotations

import asyncio
from types import TracebackType

import torch

from multiworld import World

ROUND_S = 5.0
"""Seconds after which a round trip counts as hung."""


class Traffic:
    """Keeps round trips going in a world, and counts them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._task: asyncio.Task[None] | None = None
        self._round = asyncio.Condition()
        self.rounds = 0

    async def __aenter__(self) -> Traffic:
        self._task = asyncio.create_task(self._run())
        await self.advances(3)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            sent = torch.full((64,), float(self.rounds))
            await self._world.send(sent, dst=1)
            assert torch.equal(await self._world.recv(src=1), sent)
            async with self._round:
                self.rounds += 1
                self._round.notify_all()
            await asyncio.sleep(0)

    async def advances(self, rounds: int = 20) -> None:
        """Wait for ``rounds`` more round trips, which proves that they continue now."""
        wanted = self.rounds + rounds
        async with asyncio.timeout(ROUND_S), self._round:
            while self.rounds < wanted:
                if self._task is not None and self._task.done():
                    self._task.result()
                await self._round.wait()
