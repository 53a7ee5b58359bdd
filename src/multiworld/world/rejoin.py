"""Staying in a world: join, and join again with backoff after every fault."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable

from multiworld import errors
from multiworld.world.world import World

logger = logging.getLogger("multiworld.manager")

FIRST_S = 0.1
LAST_S = 5.0  # pauses double up to this many seconds, to spare a store that is down

# Errors after which another attempt may succeed: members and stores may come back, and
# the rank of a dead process becomes free. Other errors, such as a wrong secret, are
# raised.
RETRIED = (
    errors.JoinTimeoutError,
    errors.RankTakenError,
    errors.StoreUnreachableError,
    errors.WorldBrokenError,
)


def pause_s(failures: int, chance: float) -> float:
    """Return the seconds to wait after failed attempts: exponential backoff."""
    longest = min(LAST_S, FIRST_S * 2.0 ** min(failures - 1, 16))
    # "Equal jitter": half of the pause is random, so that processes that failed
    # together do not retry together.
    return longest * (0.5 + 0.5 * chance)


async def keep(
    name: str,
    join: Callable[[], Awaitable[World]],
    newest: Callable[[], World | None],
    has_failed: Callable[[], bool],
) -> AsyncIterator[World]:
    """Yield a ready world, and its next incarnation whenever the last one has ended."""
    # ``has_failed`` returns True if a ``grow`` or ``reform`` of the program has closed
    # the world and could not open its next incarnation.
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
        except errors.WorldClosedError:
            return
        failures = 0
        while True:
            yield world
            await world.wait_incomplete()
            # While this generator waited, the program may have reformed or grown the
            # world.
            newer = newest()
            if newer is None or newer is world or not newer.is_ready:
                break
            world = newer
        if world.is_closed and newer in (None, world) and not has_failed():
            return
