"""Memory that a sender lends: the receiver's tensor lies in it, without a copy.

A block is a ``memfd`` that both processes map. The receiver marks it as free once
nothing shares the tensor's memory. The kernel frees the block when the last process
unmaps it, so a tensor outlives its sender. Without a free block, the ring of
``shared_memory`` is used.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from multiworld.backends.arrivals import Description, form_of
from multiworld.backends.direct.memory_maps import (
    map_private,
    map_shared,
    unmap,
    view_at,
)
from multiworld.backends.direct.shared_memory import check_sealed, make_sealed
from multiworld.backends.header import HeaderError

# Minimum and maximum bytes of a message whose memory is lent. A larger message does not
# fit into the cache, while its pieces in the ring do; reading it back from memory would
# cost as much as the second copy that lending saves.
MIN_LENT_BYTES, MAX_LENT_BYTES = 256 * 1024, 8 * 1024 * 1024
# Unit of the sizes of blocks in bytes, so that messages of similar sizes use the same
# block.
STEP_BYTES = 256 * 1024
# Bytes after the message, for marks; a mark is 1 while its owner uses the block.
MARK_BYTES = mmap.PAGESIZE
MAX_BLOCKS = 8  # maximum number of blocks of a lane: only a few fit into the cache
LANE_BYTES = 32 * 1024 * 1024  # maximum bytes in the blocks of a lane
PROCESS_BYTES = 256 * 1024 * 1024  # maximum bytes in the blocks of all lanes

# Number of marks of a block, one byte each: the receiver's mark, then those of its
# forks.
MARKS = 64
NO_MARKS = bytes(MARKS)


class _Total:
    """The bytes in the blocks of all lanes of this process. A forked child starts with
    a new one, so that its copies of the lanes do not count."""

    def __init__(self) -> None:
        self.bytes = 0
        # A lock, because the lanes of several event loops, each in its own thread, use
        # this.
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.bytes += size

    def forget_lock(self) -> None:
        self._lock = threading.Lock()


_total = _Total()


def lent_bytes() -> int:
    """Return the number of bytes in the blocks of all lanes of this process."""
    return _total.bytes


class Mapping:
    """Memory of a ``memfd``, unmapped when nothing refers to this object."""

    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        # Populate the mapping at once: a page fault for each page would cost more than
        # the copy that lending saves.
        self.address = map_shared(fd, size, is_populated=True)
        # A finalizer instead of ``__del__``: a fork while ``__del__`` runs would still
        # find the mapping in ``_received``.
        weakref.finalize(self, unmap, self.address, size).atexit = False
        self.memory = view_at(self.address, size)  # valid as long as this object exists

    def keep_copy(self, mark: int) -> None:
        """Replace the shared memory by a private copy in place; clear a mark."""
        content = bytes(self.memory)
        self.memory[mark] = 0
        if map_private(self.address, self.size):
            self.memory[:] = content


class _Mapped:
    def __init__(self, fd: int, size: int) -> None:
        self.size = size
        self._mapping = Mapping(fd, size + MARK_BYTES)


# Mappings of received tensors by address. ``_Forks`` copies their tensors for a forked
# child.
_received: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()


def _live() -> list[Mapping]:
    found = [reference() for reference in _received.valuerefs()]
    return [mapping for mapping in found if mapping is not None]


class _Forks:
    """Copies the tensors in lent memory for a forked child, because the sender reuses a
    block that the parent has freed. Until the child has made its copies, it holds its
    own mark on each block, so the sender cannot reuse the block."""

    def __init__(self) -> None:
        self._count = 0
        os.register_at_fork(before=self._pin, after_in_child=self._copy)

    @property
    def _slot(self) -> int:
        """Index of this fork's mark: another thread may fork before the child is done.
        A child that dies before it is done leaves its mark; the block stays unused."""
        return 1 + self._count % (MARKS - 1)

    def _pin(self) -> None:
        self._count += 1
        for mapping in _live():
            mapping.memory[mapping.size - MARK_BYTES + self._slot] = 1

    def _copy(self) -> None:
        global _total
        # Another thread may have held the lock at the fork, and nobody would release
        # it.
        _total.forget_lock()
        _total = _Total()
        for mapping in _live():
            mapping.keep_copy(mapping.size - MARK_BYTES + self._slot)


@functools.cache
def _watch_forks() -> _Forks:
    return _Forks()


class Block(_Mapped):
    """The sender's end of a block; pass on ``fd``, then call ``close_fd``."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.fd = make_sealed("multiworld-block", size + MARK_BYTES)
        try:
            super().__init__(self.fd, size)
        except BaseException:
            self.close_fd()
            raise

    @property
    def is_free(self) -> bool:
        """True if the receiver has no tensor in it."""
        marks = self._mapping.memory[self.size : self.size + MARKS]
        return marks.tobytes() == NO_MARKS

    def take(self) -> None:
        self._mapping.memory[self.size] = 1

    def write(self, begin: int, payload: memoryview) -> None:
        self._mapping.memory[begin : begin + len(payload)] = payload

    def close_fd(self) -> None:
        """Close the descriptor; the memory stays mapped. Safe to repeat."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Borrowed(_Mapped):
    """The receiver's end of a block, mapped while a tensor is in it; closes ``fd``."""

    def __init__(self, fd: int, size: int) -> None:
        try:
            is_possible = 0 < size <= MAX_LENT_BYTES
            check_sealed(fd, size + MARK_BYTES if is_possible else -1, f"{size} bytes")
            super().__init__(fd, size)
            _watch_forks()
            _received[self._mapping.address] = self._mapping
        except OSError as error:
            raise HeaderError(f"the lent memory cannot be used: {error}") from error
        finally:
            os.close(fd)

    def tensor(self, description: Description) -> Tensor:
        """Return the message's tensor; the block is free once the tensor is gone."""
        # The tensor's memory is a ctypes array, because it allows weak references. The
        # finalizer keeps the mapping alive.
        lease = (ctypes.c_ubyte * self.size).from_address(self._mapping.address)
        weakref.finalize(lease, _free, self._mapping, self.size).atexit = False
        dtype, shape, count = form_of(description)
        return torch.frombuffer(lease, dtype=dtype, count=count).view(shape)

    def part(self, begin: int, count: int) -> memoryview:
        """Return a part of the message; it must not outlive the block."""
        return self._mapping.memory[begin : begin + count]

    def free(self) -> None:
        """Free the block, because the message has been copied."""
        _free(self._mapping, self.size)


def _free(mapping: Mapping, size: int) -> None:
    mapping.memory[size] = 0


class Lender:
    """The blocks of one lane."""

    def __init__(self, announce: Callable[[Block], bool]) -> None:
        # Announces a new block to the receiver; returns False if it cannot.
        self._announce = announce
        _watch_forks()
        self._total = _total
        self._blocks: dict[int, Block] = {}

    def provide(self, size: int) -> None:
        """Make a block for a message, if none is free and there is room for one."""
        if not MIN_LENT_BYTES <= size <= MAX_LENT_BYTES or self._fitting(size):
            return
        if (number := self._place(size)) is not None:
            try:
                block = Block(number, _rounded(size))
            except OSError:
                return
            is_known = self._announce(block)
            block.close_fd()
            if is_known:
                self._total.add(block.size)
                self._blocks[number] = block

    def take(self, size: int) -> Block | None:
        """Return a free block for a message and mark it as used; None if none fits."""
        block = self._fitting(size) if size >= MIN_LENT_BYTES else None
        if block is not None:
            block.take()
        return block

    def _fitting(self, size: int) -> Block | None:
        """Return the first free block that is not much too large."""
        # Always take the first one: few blocks are then in use, and they stay in the
        # cache.
        for block in self._blocks.values():
            if size <= block.size < 2 * max(size, STEP_BYTES) and block.is_free:
                return block
        return None

    def _place(self, size: int) -> int | None:
        """Return a number for a new block, dropping free ones for room, or None."""
        wanted = _rounded(size)
        while True:
            room = min(LANE_BYTES - self._bytes, PROCESS_BYTES - lent_bytes())
            if wanted <= room and len(self._blocks) < MAX_BLOCKS:
                return next(n for n in range(MAX_BLOCKS) if n not in self._blocks)
            unused = next((b for b in self._blocks.values() if b.is_free), None)
            if unused is None:
                return None
            self._drop(unused)

    @property
    def _bytes(self) -> int:
        return sum(block.size for block in self._blocks.values())

    def _drop(self, block: Block) -> None:
        del self._blocks[block.number]
        self._total.add(-block.size)

    def close(self) -> None:
        """Unmap all blocks; safe to repeat. The receiver's tensors stay."""
        for block in list(self._blocks.values()):
            self._drop(block)


def _rounded(size: int) -> int:
    return -(-size // STEP_BYTES) * STEP_BYTES
