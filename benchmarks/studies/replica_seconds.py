"""Cost of a fleet while a load runs: the sum of the replicas over time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 0.5
"""Seconds between counts of the replicas."""


async def replica_seconds(
    running: asyncio.Future[Any], count: Callable[[], int]
) -> float:
    """Return the replica-seconds until a load ends; a cancel does not stop the load."""
    # ``count`` returns the current number of replicas; it is called in a thread.
    total, last = 0.0, time.monotonic()
    while not running.done():
        await asyncio.wait({running}, timeout=LOOK_S)
        here = await asyncio.to_thread(count)
        now = time.monotonic()
        total, last = total + here * (now - last), now
    return total
