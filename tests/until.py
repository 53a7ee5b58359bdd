"""Waiting for conditions that have no event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.001
HANG_S = 20.0


async def until(holds: Callable[[], bool], limit_s: float = HANG_S) -> None:
    """Check a condition again and again until it holds.

    Only for state inside this process that has no event to wait for. Raises
    ``TimeoutError`` after ``limit_s`` seconds.
    """
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(LOOK_S)
