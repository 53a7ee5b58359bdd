"""Counts of tenants' requests in one file that all gateways of a host share.

Each tenant with limits has a slot: requests by second, and requests in flight by
gateway. A gateway locks the slot while it reads and counts. When a gateway dies, the
kernel releases that gateway's locks, and its requests in flight no longer count. Counts
are aligned words, so a killed gateway leaves no count half-written. If the file cannot
be used, or a paused gateway holds the lock, a gateway enforces its own part of a limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("multiworld.serve")

HEADER, SLOTS, SLOT = 4096, 1024, 1024  # header bytes, number of slots, bytes of a slot
# Bytes of the hash of a tenant's name; number of seconds, and of gateways, that have
# a counter in a slot.
NAME, RING, GATEWAYS = 16, 64, 64
WINDOW = 61  # seconds whose requests count: a whole minute, and the current second
TRIES = 500  # maximum attempts to take a lock; each takes about a microsecond
# At start-up: maximum rounds of ``TRIES`` attempts, and seconds between two rounds.
START_TRIES, TRY_S = 200, 0.01

_SECONDS = struct.Struct(f"{RING}Q")  # second << 32 | number of requests in it
_SECOND = struct.Struct("Q")
_COLUMNS = struct.Struct(f"{GATEWAYS}I")  # number of requests in flight, by gateway
_COLUMN = struct.Struct("I")
AT_SECONDS, AT_COLUMNS = NAME, NAME + _SECONDS.size

# Offsets of the locked bytes for the header, for the slots, and for live gateways.
LOCKED_HEADER, LOCKED_SLOTS, LOCKED_LIVES = 0, 1 << 32, 1 << 33


class SharedUse:
    """Recent usage of a tenant at all gateways; valid while the slot is locked."""

    def __init__(self, limits: SharedLimits, place: int) -> None:
        self._limits, self._memory, self._place = limits, limits.memory, place

    def seconds(self, now: float) -> list[tuple[int, int]]:
        """Return each second of the window with requests, and their number."""
        first = math.floor(now) - WINDOW + 1
        words = _SECONDS.unpack_from(self._memory, self._place + AT_SECONDS)
        found = [(word >> 32, word & 0xFFFFFFFF) for word in words if word]
        return sorted((second, count) for second, count in found if second >= first)

    def count(self, now: float) -> None:
        second = math.floor(now)
        at = self._place + AT_SECONDS + 8 * (second % RING)
        (word,) = _SECOND.unpack_from(self._memory, at)
        before = word & 0xFFFFFFFF if word >> 32 == second else 0
        _SECOND.pack_into(self._memory, at, second << 32 | (before + 1))

    def in_flight(self, limit: float) -> int:
        """Return requests in flight; skip dead gateways if ``limit`` is reached."""
        columns = _COLUMNS.unpack_from(self._memory, self._place + AT_COLUMNS)
        if sum(columns) < limit:
            return sum(columns)
        alive = self._limits.is_alive
        return sum(count for n, count in enumerate(columns) if count and alive(n))

    def set_in_flight(self, count: int) -> None:
        at = self._place + AT_COLUMNS + 4 * self._limits.number
        _COLUMN.pack_into(self._memory, at, count)


class SharedLimits:
    """The shared file. Raises OSError if it cannot be created."""

    def __init__(self, path: Path, boot: bytes) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock_soon(LOCKED_HEADER)
            size = HEADER + SLOTS * SLOT
            os.posix_fallocate(self._file, 0, size)
            self.memory = mmap.mmap(self._file, size)
            known = hashlib.blake2b(boot, digest_size=NAME).digest()
            # Clear the counts of an earlier boot, because a boot restarts their clock.
            if self.memory[:NAME] != known:
                self.memory[NAME:] = bytes(size - NAME)
                self.memory[:NAME] = known
            self.number = self._live()
            # Clear the counts of the gateway that had this number before.
            for slot in range(SLOTS):
                at = self._place(slot) + AT_COLUMNS + 4 * self.number
                _COLUMN.pack_into(self.memory, at, 0)
            self._unlock(LOCKED_HEADER)
        except BaseException:
            os.close(self._file)
            raise
        self._slots: dict[str, int] = {}

    def close(self) -> None:
        self.memory.close()
        os.close(self._file)

    @contextlib.contextmanager
    def use(self, tenant: str, now: float) -> Iterator[SharedUse | None]:
        """Lock a tenant's slot; yield None if that fails."""
        slot = self._slot_of(tenant, now)
        if slot is None or not self._try_lock(LOCKED_SLOTS + slot):
            yield None
            return
        try:
            yield SharedUse(self, self._place(slot))
        finally:
            self._unlock(LOCKED_SLOTS + slot)

    def set_in_flight(self, tenant: str, count: int) -> None:
        slot = self._slots.get(tenant)
        if slot is not None and self._is_of(slot, _hash(tenant)):
            SharedUse(self, self._place(slot)).set_in_flight(count)

    def is_alive(self, number: int) -> bool:
        """Return whether a gateway still holds its lock, and so is alive."""
        asked = _range(fcntl.F_WRLCK, LOCKED_LIVES + number)
        found = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked)
        kind: int = struct.unpack_from("h", found)[0]
        return number == self.number or kind != fcntl.F_UNLCK

    def _live(self) -> int:
        for number in range(GATEWAYS):
            with contextlib.suppress(BlockingIOError):
                self._lock(LOCKED_LIVES + number)
                return number
        raise OSError(f"there are {GATEWAYS} gateways already")

    def _slot_of(self, tenant: str, now: float) -> int | None:
        name, slot = _hash(tenant), self._slots.get(tenant)
        if slot is not None and self._is_of(slot, name):
            return slot
        if not self._try_lock(LOCKED_HEADER):
            return None
        try:
            first = int.from_bytes(name[:4], "little") % SLOTS
            order = [(first + n) % SLOTS for n in range(SLOTS)]
            slot = next((s for s in order if self._is_of(s, name)), None)
            if slot is None:
                slot = next((s for s in order if self._is_unused(s, now)), None)
                if slot is None:
                    return None
                place = self._place(slot)
                self.memory[place + NAME : place + SLOT] = bytes(SLOT - NAME)
                self.memory[place : place + NAME] = name
        finally:
            self._unlock(LOCKED_HEADER)
        self._slots[tenant] = slot
        return slot

    def _is_of(self, slot: int, name: bytes) -> bool:
        place = self._place(slot)
        return self.memory[place : place + NAME] == name

    def _is_unused(self, slot: int, now: float) -> bool:
        if self._is_of(slot, bytes(NAME)):
            return True
        use = SharedUse(self, self._place(slot))
        return not use.seconds(now) and not use.in_flight(0)

    def _place(self, slot: int) -> int:
        return HEADER + slot * SLOT

    def _try_lock(self, place: int) -> bool:
        for _ in range(TRIES):
            with contextlib.suppress(BlockingIOError):
                self._lock(place)
                return True
        return False

    def _lock_soon(self, place: int) -> None:
        """Wait for a lock at start-up; raise OSError after about two seconds."""
        for _ in range(START_TRIES):
            if self._try_lock(place):
                return
            time.sleep(TRY_S)
        raise OSError("another gateway holds its lock")

    def _lock(self, place: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, place))

    def _unlock(self, place: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, place))


def _hash(tenant: str) -> bytes:
    return hashlib.blake2b(tenant.encode(), digest_size=NAME).digest()


def _range(kind: int, place: int) -> bytes:
    """Return fcntl's ``struct flock`` for one byte."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, place, 1, 0)


def shared_limits(path: Path) -> SharedLimits | None:
    """Open the file that gateways share; if that fails, log it and return None."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        return SharedLimits(path, boot)
    except OSError as error:
        logger.warning(
            "limits of tenants are divided between the gateways, because %s cannot be "
            "used: %s",
            path,
            error,
        )
        return None
