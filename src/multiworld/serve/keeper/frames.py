"""Frames between the stream keeper and the gateways of its host. Pure.

A frame is applied as a whole or, if its sender died while it was sent, not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

PROTOCOL = 2  # version; both ends name theirs in ``HELLO``

_LENGTH = struct.Struct("<I")
_ENTRY = struct.Struct("<BQQI")  # kind, connection, value, bytes of the payload

MAX_FRAME = 256 * 2**20  # bytes; a longer one is not from a gateway
MAX_ENTRY = MAX_FRAME // 2  # bytes of an answer that are recorded at once
PIECE_BYTES = 1024 * 1024  # maximum payload of an entry of a record


class Kind(IntEnum):
    """What an entry says; gateway → keeper unless both directions are named."""

    # About the gateway.
    HELLO = 1  # value: ``PROTOCOL``; payload: name of the gateway
    READY = 2  # it takes connections
    BEAT = 3  # its event loop runs; both directions, the keeper returns the value
    LEAVING = 4  # it takes no more connections
    # keeper → gateway. value: 1 if another gateway takes its connections; payload: the
    # numbers of those that it cannot.
    HAND_OVER = 5
    # About a connection; ``CONNECTION`` in both directions, with a descriptor. What
    # follows it, up to ``COMPLETE``, is the connection's record.
    CONNECTION = 16  # payload: ``COUNTERS``
    # Bytes read from the client; value: monotonic time in ns, which all processes of
    # a host share.
    INPUT = 17
    REQUEST = 18  # what was drawn for the current request; replaces what was before
    ITEM = 19  # a part of what the current answer shows: a token
    OUTPUT = 20  # bytes of the answer; value: events of it that they complete
    ANSWERED = 21  # the current answer has ended; value: monotonic time in ns
    IDLE = 22  # every request that was read is answered
    CLOSED = 23  # the connection
    COMPLETE = 24  # both directions: the record is whole
    INTERIM = 25  # bytes that go out before the answer: a ``100 Continue``
    CLOSING = 26  # the connection ends after what was recorded for the client
    ADMITTED = 27  # the current request is within its tenant's limits
    SKIPPED = 28  # bytes read that are not kept; value: how many
    KEPT = 29  # the current answer is read again by this id (payload); empty: no more
    WRITTEN = 30  # bytes of the answer that are not kept; value: how many
    # About a connection's place.
    # The gateway lets go of the connection. Payload: id of a stream, whose gateway gets
    # it; empty: any gateway.
    RELEASED = 64
    # The current request moves to a connection without a client; value: its number.
    SPLIT = 65
    # Payload: id of a stream. The keeper answers with a ``Place`` as value.
    FIND = 66
    # About the service.
    # The listening sockets; keeper → supervisor and gateway, and back to a new keeper.
    LISTENER = 7  # with a descriptor
    # Supervisor → keeper: the service ends, and the next one takes its connections
    # over. value: ms for which they wait.
    AWAIT = 8


class Place(IntEnum):
    """Where a stream is that is kept."""

    NOWHERE = 0
    ELSEWHERE = 1  # at another gateway
    HERE = 2  # at the gateway that asks


class FrameError(Exception):
    """The peer does not speak this protocol."""


class Entry(NamedTuple):
    """One statement of a frame."""

    kind: Kind
    connection: int = 0
    value: int = 0
    payload: bytes = b""


def entry(
    kind: Kind, connection: int = 0, value: int = 0, payload: bytes = b""
) -> bytes:
    """Return an entry's bytes."""
    return _ENTRY.pack(kind, connection, value, len(payload)) + payload


def frame(entries: Iterable[bytes]) -> bytes:
    """Return a frame of packed entries."""
    body = b"".join(entries)
    return _LENGTH.pack(len(body)) + body


def frames(entries: list[bytes]) -> list[bytes]:
    """Return entries as frames that are not longer than the peer allows; at least one.

    Each entry has to be shorter than ``MAX_ENTRY``.
    """
    found: list[list[bytes]] = [[]]
    size = 0
    for each in entries:
        if size + len(each) > MAX_FRAME:
            found.append([])
            size = 0
        found[-1].append(each)
        size += len(each)
    return [frame(each) for each in found]


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[list[Entry]]:
        """Yield the frames that ``data`` completes.

        Raises:
            FrameError: The bytes are not frames of this protocol.
        """
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._bytes)
            if size > MAX_FRAME:
                raise FrameError(f"a frame of {size} bytes")
            end = _LENGTH.size + size
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            yield list(_entries(body))


_KINDS = {int(kind): kind for kind in Kind}


def _entries(body: bytes) -> Iterator[Entry]:
    at, end = 0, len(body)
    while at < end:
        try:
            number, connection, value, size = _ENTRY.unpack_from(body, at)
            kind = _KINDS[number]
        except (struct.error, KeyError) as error:
            raise FrameError(f"not an entry: {error}") from error
        at += _ENTRY.size + size
        if at > end:
            raise FrameError("an entry is cut off")
        yield Entry(kind, connection, value, body[at - size : at])
