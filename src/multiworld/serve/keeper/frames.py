"""Frames between the stream keeper and the gateways of its host. Pure.

The receiver applies only complete frames. If a sender dies while it writes a frame, the
receiver ignores the incomplete frame.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

PROTOCOL = 3  # version, which the gateway sends in ``HELLO``

_LENGTH = struct.Struct("<I")
_ENTRY = struct.Struct("<BQQI")  # kind, connection, value, bytes of the payload

MAX_FRAME = 256 * 2**20  # bytes; a longer frame is a protocol error
MAX_ENTRY = MAX_FRAME // 2  # maximum payload of an entry
PIECE_BYTES = 1024 * 1024  # maximum payload of an entry when a whole record is sent


class Kind(IntEnum):
    """Kind of an entry; gateway → keeper, unless the comment says otherwise."""

    # About the gateway.
    HELLO = 1  # value: ``PROTOCOL``; payload: name of the gateway
    READY = 2  # the gateway takes connections
    BEAT = 3  # heartbeat of the event loop; the keeper answers with the same value
    LEAVING = 4  # the gateway takes no more connections
    # keeper → leaving gateway. value: 1 if another gateway takes over its connections;
    # payload: numbers of the connections that must stay.
    HAND_OVER = 5
    # About a connection. ``CONNECTION`` goes in both directions, with a descriptor. The
    # entries from it to ``COMPLETE`` are the connection's record.
    CONNECTION = 16  # payload: ``COUNTERS``
    # Bytes read from the client; value: monotonic time in ns, which all processes of
    # a host share.
    INPUT = 17
    REQUEST = 18  # ``Drawn`` of the current request; replaces an earlier ``Drawn``
    ITEM = 19  # a token of the current answer
    OUTPUT = 20  # bytes of the answer; value: number of its events up to these bytes
    ANSWERED = 21  # the current answer has ended; value: monotonic time in ns
    IDLE = 22  # every request that was read is answered
    CLOSED = 23  # the connection is closed
    COMPLETE = 24  # both directions: end of a record; value: index of its ``State``
    INTERIM = 25  # bytes sent before the answer: a ``100 Continue``
    CLOSING = 26  # the connection closes after the recorded output
    ADMITTED = 27  # the current request is within its tenant's limits
    SKIPPED = 28  # bytes were read, but are not recorded; value: number of bytes
    KEPT = 29  # clients may read the current answer again; payload: id of its stream
    WRITTEN = 30  # bytes of the answer that are not recorded; value: number of bytes
    # The gateway begins to read a request that it took over from another gateway. From
    # now on, the request may be the cause of the gateway's death.
    TAKEN = 31
    # About the gateway of a connection.
    # The gateway releases the connection. payload: id of a stream, so that the
    # connection goes to the gateway of that stream; empty: any gateway.
    RELEASED = 64
    # The current request moves to a connection without a client; value: number of that
    # connection.
    SPLIT = 65
    # payload: id of a stream. The keeper answers with a ``Place`` as value.
    FIND = 66
    # About the service.
    # A listening socket, sent with its descriptor: keeper → supervisor and gateways,
    # which send it to the next keeper.
    LISTENER = 7
    # Supervisor → keeper: the service shuts down, and the next service takes over the
    # connections. value: maximum time for which the connections wait, in ms.
    AWAIT = 8


class Place(IntEnum):
    """Location of a kept stream."""

    NOWHERE = 0
    ELSEWHERE = 1  # at another gateway
    HERE = 2  # at the gateway that asks


class FrameError(Exception):
    """The peer does not speak this protocol."""


class Entry(NamedTuple):
    """One message of a frame."""

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


def frames(entries: Iterable[bytes], limit: int | None = None) -> list[bytes]:
    """Return entries as frames of at most ``limit`` bytes; at least one frame.

    An entry that is longer than ``limit``, by default ``MAX_FRAME``, has a frame of its
    own. Each payload must have at most ``MAX_ENTRY`` bytes.
    """
    found: list[list[bytes]] = [[]]
    size = 0
    for each in entries:
        if found[-1] and size + len(each) > (limit or MAX_FRAME):
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
        """Yield the frames that ``data`` completes; FrameError: another protocol."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._bytes)
            if size > MAX_FRAME:
                raise FrameError(f"frame of {size} bytes is longer than {MAX_FRAME}")
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
            raise FrameError(f"frame has an invalid entry: {error}") from error
        at += _ENTRY.size + size
        if at > end:
            raise FrameError("frame ends within an entry")
        yield Entry(kind, connection, value, body[at - size : at])
