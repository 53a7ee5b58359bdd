"""Load that runs in the background while faults are injected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol


class BackgroundLoad(Protocol):
    """Load that runs until ``end`` is called."""

    async def run(self) -> object:
        """Send requests until ``end`` is called."""

    def end(self) -> None:
        """Stop sending; ``run`` returns once every answer has arrived."""


@asynccontextmanager
async def under_load(
    load: BackgroundLoad, *beside: Coroutine[Any, Any, None]
) -> AsyncIterator[None]:
    """Run a load during the block, and wait for its last answer afterwards."""
    # ``beside``, such as a live view, runs until the load has ended.
    running = asyncio.ensure_future(load.run())
    tasks = [asyncio.ensure_future(each) for each in beside]
    try:
        yield
        load.end()
        await running
    finally:
        for task in (running, *tasks):
            task.cancel()
        await asyncio.gather(running, *tasks, return_exceptions=True)
