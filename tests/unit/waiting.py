"""Waiting for a condition without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HANG_S = 20.0
"""Seconds after which a wait counts as a hang."""


async def until(condition: Callable[[], object]) -> None:
    """Run the event loop, turn by turn, until a condition holds."""
    async with asyncio.timeout(HANG_S):
        while not condition():
            await turns(1)


async def turns(count: int = 20) -> None:
    """Run the event loop for some turns, so that everything due has happened."""
    for _ in range(count):
        await asyncio.sleep(0)
