"""A uvicorn server for a process that handles signals itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

TICK_S = 1.0  # seconds between ticks, which renew the ``Date`` header of responses


class EmbeddedServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        # Replaces uvicorn's flag, which uvicorn polls ten times a second.
        self._is_ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Shut down after all requests are answered; safe to repeat."""
        self.should_exit = True
        self._is_ending.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            try:
                async with asyncio.timeout(TICK_S):
                    await self._is_ending.wait()
            except TimeoutError:
                pass
