"""A uvicorn server for a process that handles signals itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn

TICK_S = 1.0
"""Seconds between two turns of the main loop, which renew the ``Date`` of answers."""


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its process.

    uvicorn looks ten times a second whether it is to end; this server is told.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_ending = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    def end(self) -> None:
        """End the server once all requests are answered; safe to repeat."""
        self.should_exit = True
        self._is_ending.set()

    async def main_loop(self) -> None:
        """Do what is to be done every second until ``end`` is called.

        Cancellation: Safe.
        """
        while not await self.on_tick(0):
            try:
                async with asyncio.timeout(TICK_S):
                    await self._is_ending.wait()
            except TimeoutError:
                pass
