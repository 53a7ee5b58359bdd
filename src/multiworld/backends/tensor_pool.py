"""Memory that large messages arrive in, used again when their tensors are gone.

New memory costs a page fault for every 4 KiB, which can take ten times as long as the
copy into it. So what a large received tensor lay in waits here for the next one. It is
not given out before the last tensor, view or array that shares it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

import torch
from torch import Tensor

RECYCLED_BYTES = 1024 * 1024
"""Smaller ones come from the allocator, which keeps such memory itself."""

KEPT_BYTES = 128 * 1024 * 1024
"""Most that a process keeps unused; what is beyond goes back to the system."""

STEP_BYTES = 256 * 1024
"""Sizes are rounded up to it, so that like sizes share memory."""


class TensorPool:
    """Blocks of memory that nobody uses at the moment."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._idle: deque[mmap.mmap] = deque()

    @property
    def idle_bytes(self) -> int:
        """Bytes of the blocks that wait here."""
        return sum(map(len, list(self._idle)))

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor of ``count`` elements, not initialised.

        Its storage is exactly as long, and cannot be resized.

        Raises:
            MemoryError: There is not as much.
        """
        size = count * dtype.itemsize
        block = self._take(size) or _new(-(-size // STEP_BYTES) * STEP_BYTES)
        # A ctypes array: it can be referred to weakly, and keeps the block's buffer.
        lease = (ctypes.c_ubyte * len(block)).from_buffer(block)
        weakref.finalize(lease, self._give_back, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count)

    def _take(self, size: int) -> mmap.mmap | None:
        """Return the smallest block that is large enough, and not twice as large."""
        fits = [block for block in list(self._idle) if size <= len(block) < 2 * size]
        for block in sorted(fits, key=len):
            try:
                self._idle.remove(block)
            except ValueError:  # another thread's loop was faster
                continue
            return block
        return None

    def _give_back(self, block: mmap.mmap) -> None:
        # From the collector, so perhaps in the middle of the methods above: no locks.
        self._idle.append(block)
        while self.idle_bytes > self._kept_bytes:
            try:
                self._idle.popleft()
            except IndexError:
                return


def _new(size: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error


recycler = TensorPool()
"""This process's."""
