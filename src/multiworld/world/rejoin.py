"""Staying in a world: join, and join again after every fault.

``RETRIED`` lists the errors after which another attempt makes sense, and ``pause_s``
gives the backoff between attempts.
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
"""Seconds of the shortest and the longest pause. Pauses double from one to the other: a
replaced member returns within tenths of a second, and a store that is down for long is
not flooded with attempts."""

RETRIED = (
    JoinTimeoutError,
    RankTakenError,
    StoreUnreachableError,
    WorldBrokenError,
)
"""Errors after which another attempt may succeed: members and stores come back, and the
rank of a dead process becomes free. Any other error (an invalid value, another version,
a wrong secret) is raised."""


def pause_s(failures: int, chance: float) -> float:
    """Return the seconds to wait after failed attempts: exponential backoff.

    Args:
        failures: Failed attempts in a row, 1 or more.
        chance: Random number from 0 to 1. It scales the pause from half to full, so
            that members that failed together do not retry together ("equal jitter").
    """
    longest = min(LAST_S, FIRST_S * 2.0 ** min(failures - 1, 16))
    return longest * (0.5 + 0.5 * chance)


async def keep(
    name: str,
    join: Callable[[], Awaitable[World]],
    newest: Callable[[], World | None],
) -> AsyncIterator[World]:
    """Yield a ready world, and its next incarnation whenever the last one has ended.

    An incarnation ends when it breaks or a member leaves. The iteration ends when this
    process closes the world or its manager.

    Args:
        name: The world's name, for the log.
        join: Joins the world.
        newest: Returns the manager's newest incarnation of the world, or None.

    Cancellation:
        Safe; the world stays as it is.
    """
    failures = 0
    while True:
        try:
            world = await join()
        except RETRIED as error:
            failures += 1
            wait_s = pause_s(failures, random.random())
            logger.info(
                "world %r: attempt %d to join failed, next in %.1f s: %s",
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
            # The program may have reformed or grown the world meanwhile.
            newer = newest()
            if newer is None or newer is world or not newer.is_ready:
                break
            world = newer
        if world.is_closed and newer in (None, world):
            return
