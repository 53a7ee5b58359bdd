"""Locks of one user on one host; the kernel releases the locks of a lost process."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

logger = logging.getLogger("multiworld.serve")

POLL_S = 0.25  # seconds between attempts to take a lock that another process holds


def host_lock(kind: str, name: str) -> int | None:
    """Return a descriptor that holds a lock; None if another process holds it."""
    folder = Path(tempfile.gettempdir()) / f"multiworld-{kind}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(folder / name.replace("/", "_"), flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


@contextlib.asynccontextmanager
async def all_locked(kind: str, names: Iterable[str]) -> AsyncIterator[None]:
    """Wait until all of these locks are free, and hold them in the context."""
    held: list[int] = []
    try:
        try:
            # Sorted, so that all processes take the locks in one order and cannot
            # deadlock.
            for name in sorted(set(names)):
                while (lock := host_lock(kind, name)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                held.append(lock)
        except OSError as error:
            logger.warning("%s are not locked: %s", kind, error)
        yield
    finally:
        for lock in held:
            os.close(lock)
