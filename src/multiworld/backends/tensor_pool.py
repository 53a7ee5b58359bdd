"""A pool of the memory of large received tensors. A block is reused once the last
tensor, view or array on it is gone. New memory would cost a page fault for every 4 KiB:
up to ten times as much as the copy into it."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

import torch
from torch import Tensor

# Minimum bytes of a message that uses the pool: for smaller ones, the C allocator
# already reuses memory.
RECYCLED_BYTES = 1024 * 1024
# Maximum bytes that are kept unused; further blocks are unmapped.
KEPT_BYTES = 128 * 1024 * 1024
# Unit of block sizes in bytes, so that messages of similar sizes use the same block.
STEP_BYTES = 256 * 1024


class TensorPool:
    """Pool of memory blocks that no tensor uses."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._idle: deque[mmap.mmap] = deque()

    @property
    def idle_bytes(self) -> int:
        return sum(map(len, list(self._idle)))

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor, uninitialised, whose storage cannot be resized."""
        size = count * dtype.itemsize
        block = self._take(size) or _new(-(-size // STEP_BYTES) * STEP_BYTES)
        # The tensor's memory is a ctypes array, because it allows weak references and
        # keeps the block's buffer alive.
        lease = (ctypes.c_ubyte * len(block)).from_buffer(block)
        weakref.finalize(lease, self._release, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count)

    def _take(self, size: int) -> mmap.mmap | None:
        """Return the smallest fitting block that is less than twice as large."""
        fits = [block for block in list(self._idle) if size <= len(block) < 2 * size]
        for block in sorted(fits, key=len):
            try:
                self._idle.remove(block)
            except ValueError:  # another thread's loop has taken the block
                continue
            return block
        return None

    def _release(self, block: mmap.mmap) -> None:
        # No locks: the garbage collector may call this while a method above runs.
        self._idle.append(block)
        while self.idle_bytes > self._kept_bytes:
            try:
                self._idle.popleft()
            except IndexError:
                return


def _new(size: int) -> mmap.mmap:
    try:
        # A private mapping: a forked child must not share memory that its parent
        # receives into.
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot allocate {size} bytes: {error}") from error


recycler = TensorPool()  # the process's pool
