"""The frame header of the direct data path. Pure.

A frame is a header followed by its payload. A message of up to ``FRAGMENT_BYTES`` is
one frame. A larger message is several frames, and its content is their payloads, one
after the other. Layout, little-endian:

====== ===== ============ ======================================================
offset bytes field        meaning
====== ===== ============ ======================================================
0      4     magic        ``MWD1``
4      4     header sum   CRC-32 of the rest of the header and of the dimensions
8      1     version      of this layout
9      1     kind         tensor, bundle, object, collective, fin, withdraw, memory,
                          bell, lend
10     1     flags        1: last fragment · 2: the payload sum is set · 4: the payload
                          is in shared memory · 8: it is in a lent block
11     1     dtype        code of the elements (``backends.dtypes``)
12     1     ndim         dimensions that follow the header (first fragment only)
13     1     slot         slot or block with the payload · memory: number of slots
                          · lend: number of the block
14     2     reserved     zero
16     8     nonce        of the incarnation
24     8     sequence     number of the frame on its lane, from 0
32     8     tag          of the message · collective: 0
40     4     fragment     index of the frame in its message, from 0
44     4     payload      bytes of this frame after header and dimensions
48     8     size         bytes of the whole message · lend: bytes of the block
56     4     label        bundle: bytes of manifest · collective: code, op, root
60     4     payload sum  CRC-32 of the payload, or 0
64     8*n   dimensions   the tensor's shape · collective: number, elements
====== ===== ============ ======================================================
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

MAGIC = b"MWD1"

VERSION = 1

MAX_NDIM = 64  # maximum number of dimensions of a tensor; torch rarely allows more

TENSOR, BUNDLE, OBJECT, COLLECTIVE, FIN, WITHDRAW, MEMORY, BELL, LEND = range(9)
KIND_NAMES = ("a tensor", "a bundle", "an object", "a collective")

LAST = 1
SUMMED = 2
SHARED = 4
LENT = 8

# Maximum bytes of one frame's payload. A cancelled send still finishes its frame, and a
# lane moves about this much before it lets the event loop's other tasks run.
FRAGMENT_BYTES = 256 * 1024

_LEAD = struct.Struct("<4sI")
_FIELDS = "<BBBBBBxxQQqIIQII"
# The layouts of the bytes that the header sum covers, by number of dimensions.
_BODIES = [struct.Struct(f"{_FIELDS}{n}Q") for n in range(MAX_NDIM + 1)]

_DIMENSIONS = [struct.Struct(f"<{n}Q") for n in range(MAX_NDIM + 1)]
SIZE = _LEAD.size + _BODIES[0].size  # bytes of a header without its dimensions

assert SIZE == 64


class HeaderError(Exception):
    """The received bytes are not a valid frame of this lane, so its world breaks."""


class Header(NamedTuple):
    """The fields of a header, without its dimensions."""

    kind: int
    flags: int
    dtype: int
    ndim: int
    slot: int
    nonce: int
    sequence: int
    tag: int
    fragment: int
    payload: int
    size: int
    label: int
    payload_sum: int


def encode(header: Header, shape: tuple[int, ...] = ()) -> bytes:
    body = _BODIES[len(shape)].pack(VERSION, *header, *shape)
    return _LEAD.pack(MAGIC, zlib.crc32(body)) + body


def decode(
    buffer: memoryview, begin: int, end: int
) -> tuple[Header, tuple[int, ...]] | None:
    """Return the header at ``begin`` and its dimensions; None if incomplete."""
    if end - begin < SIZE:
        return None
    magic, total = _LEAD.unpack_from(buffer, begin)
    if magic != MAGIC:
        raise HeaderError(f"the frame starts with {magic!r} instead of {MAGIC!r}")
    version, *fields = _BODIES[0].unpack_from(buffer, begin + _LEAD.size)
    if version != VERSION:
        raise HeaderError(f"the frame has version {version} instead of {VERSION}")
    header = Header._make(fields)
    ndim = header.ndim
    if ndim > MAX_NDIM:
        raise HeaderError(f"the frame announces {ndim} dimensions, over the limit")
    if begin + SIZE + 8 * ndim > end:
        return None
    if zlib.crc32(buffer[begin + _LEAD.size : begin + SIZE + 8 * ndim]) != total:
        raise HeaderError("the header's checksum is wrong")
    return header, _DIMENSIONS[ndim].unpack_from(buffer, begin + SIZE)
