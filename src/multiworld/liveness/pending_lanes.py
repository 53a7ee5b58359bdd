"""Data connections not yet taken by a world, and worlds that wait for connections."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from multiworld.net.streams import Stream

# With this many pending lanes, further lanes for unknown incarnations are refused.
LIMIT = 1024
KEPT_S = 60.0  # seconds that a lane is kept while its incarnation is unknown
LaneKey = tuple[int, int, str]  # nonce of the incarnation, rank of the member, channel


@dataclass(slots=True)
class _Slot:
    future: asyncio.Future[Stream]
    since: float = field(default_factory=time.monotonic)


class PendingLanes:
    def __init__(self) -> None:
        self._slots: dict[LaneKey, _Slot] = {}
        self._counts: Counter[int] = Counter()  # number of lanes by incarnation
        # Number of lanes by incarnation and member.
        self._arrived: Counter[tuple[int, int]] = Counter()

    @property
    def is_full(self) -> bool:
        return len(self._slots) >= LIMIT

    def count(self, nonce: int) -> int:
        """Return the number of lanes that an incarnation awaits or has not taken."""
        return self._counts[nonce]

    def count_of(self, nonce: int, rank: int) -> int:
        """Return the number of lanes from a member that its world has not taken yet."""
        return self._arrived[nonce, rank]

    def put(self, key: LaneKey, stream: Stream) -> None:
        """Keep a connection until a world takes it; ``ValueError`` for a second one."""
        future = self._slot(key).future
        if future.done():
            raise ValueError("the lane already has a connection")
        future.set_result(stream)
        self._arrived[key[:2]] += 1

    def has(self, key: LaneKey) -> bool:
        slot = self._slots.get(key)
        return slot is not None and _is_there(slot.future)

    async def get(self, key: LaneKey) -> Stream:
        """Wait for a connection and take it; ``drop`` and ``close`` cancel the wait."""
        future = self._slot(key).future
        try:
            return await future
        except asyncio.CancelledError:
            _discard(future)
            raise
        finally:
            self._remove(key)

    def _remove(self, key: LaneKey) -> _Slot | None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._counts[key[0]] -= 1
            if not self._counts[key[0]]:
                del self._counts[key[0]]
            if slot.future.done() and not slot.future.cancelled():
                self._arrived[key[:2]] -= 1
                if not self._arrived[key[:2]]:
                    del self._arrived[key[:2]]
        return slot

    def _slot(self, key: LaneKey) -> _Slot:
        if key not in self._slots:
            future = asyncio.get_running_loop().create_future()
            self._slots[key] = _Slot(future)
            self._counts[key[0]] += 1
        return self._slots[key]

    def drop(self, nonce: int) -> None:
        """Close connections and cancel waits for an incarnation that has ended."""
        for key in [key for key in self._slots if key[0] == nonce]:
            self._discard(key)

    def purge(self, known: Collection[int], now: float) -> None:
        """Close connections that the peer has closed or that have waited ``KEPT_S``."""
        for key, slot in list(self._slots.items()):
            is_late = key[0] not in known and now - slot.since > KEPT_S
            if is_late or (_is_there(slot.future) and _is_given_up(slot.future)):
                self._discard(key)

    def _discard(self, key: LaneKey) -> None:
        if (slot := self._remove(key)) is not None:
            _discard(slot.future)

    def close(self) -> None:
        for key in list(self._slots):
            self._discard(key)


def _is_there(future: asyncio.Future[Stream]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _is_given_up(future: asyncio.Future[Stream]) -> bool:
    """Return whether the peer closed the connection without sending anything."""
    stream = future.result()
    if not isinstance(stream, socket.socket):
        return False  # TLS allows no peek, and a read would consume the bytes
    try:
        return not stream.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


def _discard(future: asyncio.Future[Stream]) -> None:
    if not future.done():
        future.cancel()
    elif _is_there(future):
        future.result().close()
