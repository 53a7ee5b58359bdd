"""A load that runs while a story is played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol


class Runs(Protocol):
    """A load."""

    async def run(self) -> object:
        """Send until ``end``.

        Cancellation:
            Gives up what is under way.
        """

    def end(self) -> None:
        """Begin nothing more; what is under way is finished."""


@asynccontextmanager
async def under_load(
    load: Runs, *beside: Coroutine[Any, Any, None]
) -> AsyncIterator[None]:
    """Run a load during the block, and finish it afterwards.

    Args:
        load: The load.
        beside: What runs beside it until it is finished, such as a screen.

    Cancellation:
        The load is finished all the same.
    """
    running = asyncio.ensure_future(load.run())
    tasks = [asyncio.ensure_future(each) for each in beside]
    try:
        yield
    finally:
        load.end()
        await running
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
