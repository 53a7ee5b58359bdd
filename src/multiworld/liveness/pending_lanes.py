"""Data connections that wait for their world, and worlds that wait for them. Shell."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from multiworld.net.streams import Stream

LIMIT = 1024
"""Most connections that wait for incarnations which nobody here has heard of yet."""

KEPT_S = 60.0
"""Seconds that they wait."""

LaneKey = tuple[int, int, str]
"""Nonce of the incarnation, rank of the member, channel."""


@dataclass(slots=True)
class _Place:
    future: asyncio.Future[Stream]
    since: float = field(default_factory=time.monotonic)


class PendingLanes:
    """Where a connection and whoever waits for it meet."""

    def __init__(self) -> None:
        self._places: dict[LaneKey, _Place] = {}

    @property
    def is_full(self) -> bool:
        """True while no more strangers can be kept."""
        return len(self._places) >= LIMIT

    def put(self, key: LaneKey, stream: Stream) -> None:
        """Keep a connection until it is asked for.

        Raises:
            ValueError: It is there already.
        """
        future = self._place(key).future
        if future.done():
            raise ValueError("that lane is there already")
        future.set_result(stream)

    def has(self, key: LaneKey) -> bool:
        """Tell whether a connection waits to be taken."""
        place = self._places.get(key)
        return place is not None and _is_there(place.future)

    async def get(self, key: LaneKey) -> Stream:
        """Wait for a connection and take it.

        Cancellation: safe; nothing stays open.
        """
        future = self._place(key).future
        try:
            return await future
        except asyncio.CancelledError:
            _discard(future)
            raise
        finally:
            self._places.pop(key, None)

    def _place(self, key: LaneKey) -> _Place:
        if key not in self._places:
            future = asyncio.get_running_loop().create_future()
            self._places[key] = _Place(future)
        return self._places[key]

    def drop(self, nonce: int) -> None:
        """Hang up on what waits for an incarnation that is over."""
        for key in [key for key in self._places if key[0] == nonce]:
            _discard(self._places.pop(key).future)

    def purge(self, known: Collection[int], now: float) -> None:
        """Hang up on what has waited too long for incarnations nobody knows, and on
        what the other side has given up."""
        for key, place in list(self._places.items()):
            is_late = key[0] not in known and now - place.since > KEPT_S
            if is_late or (_is_there(place.future) and _is_given_up(place.future)):
                _discard(self._places.pop(key).future)

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        futures = [place.future for place in self._places.values()]
        return [f.result().fileno() for f in futures if _is_there(f)]

    def close(self) -> None:
        """Hang up on everything."""
        for place in self._places.values():
            _discard(place.future)
        self._places.clear()


def _is_there(future: asyncio.Future[Stream]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _is_given_up(future: asyncio.Future[Stream]) -> bool:
    """Tell whether the other side hung up before it sent anything."""
    stream = future.result()
    if not isinstance(stream, socket.socket):
        return False  # under TLS a look takes what it sees
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
