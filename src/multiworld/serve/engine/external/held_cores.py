"""Cores that engines on this host hold, so that no two engines compute on one core.

Two engines on one core would wait for each other's time slices in every step. vLLM
binds its threads to the first cores that it may use, which would be the same for all
replicas.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from multiworld.serve.engine.external.host_locks import host_lock

logger = logging.getLogger("multiworld.serve")


class HeldCores:
    """Whole cores (``numbers``), held until ``release`` or the end of this process.

    If fewer than ``count`` cores are free, none are held.
    """

    def __init__(self, count: int) -> None:
        self.numbers: list[int] = []
        self._locks: list[int] = []
        try:
            for number in sorted(os.sched_getaffinity(0)) if count else ():
                lock = host_lock("cores", str(number))
                if lock is not None:
                    self._locks.append(lock)
                    self.numbers.append(number)
                if len(self.numbers) == count:
                    return
        except OSError as error:
            logger.warning("cores are not held: %s", error)
        if count:
            found = len(self.numbers)
            text = (
                "only %d of %d requested cores are free; the engine may use all cores"
            )
            logger.warning(text, found, count)
        self.release()

    @contextlib.contextmanager
    def of_children(self) -> Iterator[None]:
        """In the context, start this thread's child processes on these cores."""
        before = os.sched_getaffinity(0)
        if self.numbers:
            os.sched_setaffinity(0, self.numbers)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks, self.numbers = [], []
