"""Staying in a world for as long as it is wanted: join, and join again. Shell.

What is worth another try and how long to wait is decided by ``worth_retrying`` and
``pause_s``, which know no clock.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable

from multiworld.errors import (
    JoinTimeoutError,
    RankTakenError,
    StoreUnreachableError,
    WorldBrokenError,
    WorldClosedError,
)
from multiworld.world.world import World

logger = logging.getLogger("multiworld.manager")

FIRST_S = 0.1
LAST_S = 5.0
"""The pauses double from the first to the last: a member that was replaced is back in
tenths of a second, and a store that is away for long is not hammered."""

RETRIED = (
    JoinTimeoutError,
    RankTakenError,
    StoreUnreachableError,
    WorldBrokenError,
)
"""What another try may mend: members and stores come back, and a rank that is held by a
process which is gone is free as soon as that is known. All else (a value that cannot
be, another version, a wrong secret) is raised."""


def pause_s(failures: int, chance: float) -> float:
    """Return how long to wait after so many failures in a row.

    Args:
        failures: One or more.
        chance: From 0 to 1; spreads members that failed together (full jitter between
            half and whole).
    """
    longest = min(LAST_S, FIRST_S * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * chance)


async def keep(
    name: str,
    join: Callable[[], Awaitable[World]],
    newest: Callable[[], World | None],
) -> AsyncIterator[World]:
    """Yield a ready world, and its next incarnation whenever it is over.

    Ends when this process closes the world or its manager. An incarnation that a member
    has left counts as over.

    Cancellation: safe; the world stays as it is.
    """
    failures = 0
    while True:
        try:
            world = await join()
        except RETRIED as error:
            failures += 1
            wait_s = pause_s(failures, random.random())
            logger.info(
                "world %r: attempt %d failed, next in %.1f s: %s",
                name,
                failures,
                wait_s,
                error,
            )
            await asyncio.sleep(wait_s)
            continue
        except WorldClosedError:
            return
        failures = 0
        while True:
            yield world
            await world.wait_incomplete()
            # It may have been reformed or grown meanwhile.
            newer = newest()
            if newer is None or newer is world or not newer.is_ready:
                break
            world = newer
        if world.is_closed and newer in (None, world):
            return
