"""Shared memory for large payloads between two processes of one host.

Each direction of a lane has a ring of slots in a ``memfd``. The sender fills a slot,
sets its mark, and sends the header over the socket; the receiver copies the payload out
and clears the mark. The kernel frees the memory when the last process unmaps it.
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import sys
from typing import Any

from multiworld.backends.direct.memory_maps import shared_view
from multiworld.backends.header import HeaderError

# Twice the payload of a socket frame: copies are as fast, with half as many frames. The
# size is a multiple of every dtype's size, so that a slot holds whole elements.
SLOT_BYTES = 512 * 1024
MAX_SLOTS = 64  # maximum number of slots in a ring
# Offset of the byte after the marks, which is 1 while the sender waits.
_WAITING = MAX_SLOTS
# Bytes before the first slot, for the marks and ``_WAITING``: one page.
CONTROL_BYTES = 4096

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def is_usable(sock: Any) -> bool:
    """Return whether payloads on this connection can go through shared memory."""
    # The sender's copy happens before the receiver's: a system call lies between. But
    # only the processor can guarantee that the receiver's copy ends before the receiver
    # clears the mark: no load may be delayed past a later store.
    return (
        sys.platform == "linux"
        # This architecture delays no load past a later store.
        and platform.machine() == "x86_64"
        and isinstance(sock, socket.socket)
        and sock.family == socket.AF_UNIX
    )


def slots_in(size_bytes: int) -> int:
    """Return the number of slots in a ring of at most this size; 0 means no ring."""
    return min(MAX_SLOTS, size_bytes // SLOT_BYTES)


def make_sealed(name: str, size: int) -> int:
    """Return the descriptor of new memory whose size cannot change."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_sealed(fd: int, size: int, what: str) -> None:
    """Check a peer's memory: if it shrank, access would kill this process (SIGBUS)."""
    if os.fstat(fd).st_size != size:
        raise HeaderError(f"the shared memory does not have the size of {what}")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise HeaderError("the shared memory is not sealed")


class _Mapped:
    def __init__(self, fd: int, slots: int) -> None:
        self.slots = slots
        self._memory = shared_view(fd, CONTROL_BYTES + slots * SLOT_BYTES)

    def _slot(self, slot: int, size: int) -> memoryview:
        begin = CONTROL_BYTES + slot * SLOT_BYTES
        return self._memory[begin : begin + size]

    def close(self) -> None:
        self._memory.release()


class Ring(_Mapped):
    """The sender's end of a ring; pass on ``fd``, then call ``close_fd``."""

    def __init__(self, slots: int) -> None:
        size = CONTROL_BYTES + slots * SLOT_BYTES
        self.fd = make_sealed("multiworld-lane", size)
        try:
            super().__init__(self.fd, slots)
        except BaseException:
            self.close_fd()
            raise

    def close_fd(self) -> None:
        """Close the descriptor; the memory stays mapped. Safe to repeat."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def has_room(self) -> bool:
        return self._free >= 0

    @property
    def _free(self) -> int:
        """Number of the first free slot, or -1."""
        # Always take the first one: few slots are then in use, and they stay in the
        # cache.
        return bytes(self._memory[: self.slots]).find(0)

    def fill(self, payload: memoryview) -> int:
        """Copy a payload into a free slot (see ``has_room``); return its number."""
        slot = self._free
        self._slot(slot, len(payload))[:] = payload
        self._memory[slot] = 1
        return slot

    def request_bell(self) -> bool:
        """Ask the receiver for a bell; return True if a slot is free already."""
        self._memory[_WAITING] = 1
        return self.has_room

    def close(self) -> None:
        self.close_fd()
        super().close()


class Window(_Mapped):
    """The receiver's end of a ring; closes ``fd`` in every case."""

    def __init__(self, fd: int, slots: int) -> None:
        try:
            is_possible = 0 < slots <= MAX_SLOTS
            size = CONTROL_BYTES + slots * SLOT_BYTES if is_possible else -1
            check_sealed(fd, size, f"{slots} slots")
            super().__init__(fd, slots)
        except OSError as error:
            raise HeaderError(f"the shared memory cannot be used: {error}") from error
        finally:
            os.close(fd)

    def payload(self, slot: int, size: int) -> memoryview:
        """Return the first ``size`` bytes of a filled slot."""
        if slot >= self.slots or size > SLOT_BYTES or not self._memory[slot]:
            raise HeaderError(f"slot {slot} does not hold a payload of {size} bytes")
        return self._slot(slot, size)

    def free_all(self) -> None:
        """Mark every slot free, without a bell: a waiting sender also polls."""
        self._memory[: self.slots] = bytes(self.slots)

    def free(self, slot: int) -> bool:
        """Mark a slot free; return True if the caller must ring the bell."""
        memory = self._memory
        memory[slot] = 0
        # Wake the sender only once half of the slots are free, so that it wakes up less
        # often.
        if (
            not memory[_WAITING]
            or 2 * bytes(memory[: self.slots]).count(0) < self.slots
        ):
            return False
        memory[_WAITING] = 0
        return True
