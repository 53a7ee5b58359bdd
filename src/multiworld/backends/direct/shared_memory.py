"""Shared memory for large payloads between two processes of one host.

Each direction of a lane has a ring of slots in a ``memfd``, passed by descriptor over
the lane's Unix socket at the first large message. The sender copies a fragment into a
slot and sends its header; the receiver copies it out and frees the slot. Frames
keep their order on the socket, which is the bell. Nothing has a name in a file system:
the kernel frees the memory with the last process that has it.

A slot's mark is one byte: 1 is written by the sender before the header is sent, 0 by
the receiver after its copy. A system call lies between the sender's copy and the
receiver's; between the receiver's copy and its mark only the order of a processor that
keeps loads before later stores, so this is used on x86-64 and nowhere else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import socket
import sys
from typing import Any

from multiworld.backends.direct.header import HeaderError

SLOT_BYTES = 512 * 1024
"""Twice a frame on the socket: a copy is as fast, and half as many frames. A multiple
of every dtype's size: a slot holds whole elements."""

MOST_SLOTS = 64
_WAITING = MOST_SLOTS
"""Where, behind the slots' marks, the sender says that it waits for one."""

CONTROL_BYTES = 4096

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def is_usable(sock: Any) -> bool:
    """Whether payloads on this connection can go through shared memory."""
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and isinstance(sock, socket.socket)
        and sock.family == socket.AF_UNIX
    )


def slots_in(size_bytes: int) -> int:
    """Return how many slots a ring of about this size has; 0 for none."""
    return min(MOST_SLOTS, size_bytes // SLOT_BYTES)


class _Mapped:
    """Memory that two processes have mapped."""

    def __init__(self, fd: int, slots: int) -> None:
        self.slots = slots
        self._map = mmap.mmap(fd, CONTROL_BYTES + slots * SLOT_BYTES)
        self._memory = memoryview(self._map)

    def _slot(self, slot: int, size: int) -> memoryview:
        begin = CONTROL_BYTES + slot * SLOT_BYTES
        return self._memory[begin : begin + size]

    def close(self) -> None:
        """Unmap it; safe to repeat."""
        self._memory.release()
        self._map.close()


class Ring(_Mapped):
    """The sender's end. ``fd`` is to be passed on, and then closed.

    Raises:
        OSError: There is no memory, or no descriptor.
    """

    def __init__(self, slots: int) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.fd = os.memfd_create("multiworld-lane", flags)
        try:
            os.ftruncate(self.fd, CONTROL_BYTES + slots * SLOT_BYTES)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            super().__init__(self.fd, slots)
        except BaseException:
            self.close_fd()
            raise

    def close_fd(self) -> None:
        """Close the descriptor; the memory stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def has_room(self) -> bool:
        """Whether a slot is free."""
        return self._free >= 0

    @property
    def _free(self) -> int:
        """The first free slot, or -1: as few as possible stay in the cache."""
        return bytes(self._memory[: self.slots]).find(0)

    def fill(self, payload: memoryview) -> int:
        """Copy a payload into a free slot, and return its number."""
        slot = self._free
        self._slot(slot, len(payload))[:] = payload
        self._memory[slot] = 1
        return slot

    def want(self) -> bool:
        """Ask to be told when a slot is free; True if one is by now."""
        self._memory[_WAITING] = 1
        return self.has_room

    def close(self) -> None:
        """Unmap it."""
        self.close_fd()
        super().close()


class Window(_Mapped):
    """The receiver's end. Closes ``fd``, whatever happens.

    Raises:
        HeaderError: It is not what was announced.
    """

    def __init__(self, fd: int, slots: int) -> None:
        try:
            size = CONTROL_BYTES + slots * SLOT_BYTES
            if not 0 < slots <= MOST_SLOTS or os.fstat(fd).st_size != size:
                raise HeaderError(f"its shared memory is not of {slots} slots")
            # Memory that the sender could shrink would kill this process.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise HeaderError("its shared memory is not sealed")
            super().__init__(fd, slots)
        except OSError as error:
            raise HeaderError(f"its shared memory cannot be used: {error}") from error
        finally:
            os.close(fd)

    def payload(self, slot: int, size: int) -> memoryview:
        """Return what is in a slot.

        Raises:
            HeaderError: There is no such slot, or nothing in it.
        """
        if slot >= self.slots or size > SLOT_BYTES or not self._memory[slot]:
            raise HeaderError(f"it points at slot {slot}, which holds nothing")
        return self._slot(slot, size)

    def free_all(self) -> None:
        """Mark every slot free; a sender that waits looks again by itself."""
        self._memory[: self.slots] = bytes(self.slots)

    def free(self, slot: int) -> bool:
        """Mark a slot free; True if the sender is to be told.

        It is told when half of the ring is free: told of each slot, it would be woken
        for each.
        """
        memory = self._memory
        memory[slot] = 0
        if (
            not memory[_WAITING]
            or 2 * bytes(memory[: self.slots]).count(0) < self.slots
        ):
            return False
        memory[_WAITING] = 0
        return True
