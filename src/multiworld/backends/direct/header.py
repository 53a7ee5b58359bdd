"""The frame header of the direct data path. Pure.

Every frame is a header, then its payload. A message of up to ``FRAGMENT_BYTES`` is one
frame; a larger one is several, whose payloads follow each other. Layout, little-endian:

====== ===== ============ ======================================================
offset bytes field        meaning
====== ===== ============ ======================================================
0      4     magic        ``MWD1``
4      4     header sum   CRC-32 of all that follows, the dimensions too
8      1     version      of this layout
9      1     kind         tensor, bundle, object, collective, fin, withdraw, memory,
                          bell
10     1     flags        1: last fragment · 2: the payload sum is set · 4: the payload
                          is in shared memory
11     1     dtype        code of the elements (``backends.dtypes``)
12     1     ndim         dimensions that follow the header (first fragment only)
13     1     slot         of the shared memory; of memory: how many there are
14     2     reserved     zero
16     8     nonce        of the incarnation
24     8     sequence     of the frame on its lane, from 0
32     8     tag          of the message; of a collective: its number
40     4     fragment     index in the message, from 0
44     4     payload      bytes of this frame behind the header
48     8     size         bytes of the whole message
56     4     label        bundle: bytes of manifest · collective: what it is
60     4     payload sum  CRC-32 of the payload, or 0
64     8*n   dimensions   the tensor's shape
====== ===== ============ ======================================================
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

MAGIC = b"MWD1"
VERSION = 1

TENSOR, BUNDLE, OBJECT, COLLECTIVE, FIN, WITHDRAW, MEMORY, BELL = range(8)
KIND_NAMES = ("a tensor", "a bundle", "an object", "a collective")

LAST = 1
SUMMED = 2
SHARED = 4

FRAGMENT_BYTES = 256 * 1024
"""Largest payload of one frame: what a cancelled send still has to finish, and what
may pass before a lane gives way to other tasks."""

MAX_NDIM = 64
"""Torch's own limit on dimensions."""

_LEAD = struct.Struct("<4sI")
_FIELDS = "<BBBBBBxxQQqIIQII"
_BODIES = [struct.Struct(f"{_FIELDS}{n}Q") for n in range(MAX_NDIM + 1)]
"""All that the sum covers, by the number of dimensions."""

_DIMENSIONS = [struct.Struct(f"<{n}Q") for n in range(MAX_NDIM + 1)]
SIZE = _LEAD.size + _BODIES[0].size
assert SIZE == 64


class HeaderError(Exception):
    """What arrived is not a header of this lane; the message says why."""


class Header(NamedTuple):
    """A header, without its dimensions."""

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
    """Return the bytes of ``header`` and its dimensions."""
    body = _BODIES[len(shape)].pack(VERSION, *header, *shape)
    return _LEAD.pack(MAGIC, zlib.crc32(body)) + body


def decode(
    buffer: memoryview, begin: int, end: int
) -> tuple[Header, tuple[int, ...]] | None:
    """Return the header at ``begin`` of a buffer, and its dimensions.

    Args:
        end: Where what has arrived ends; None is returned if that is not all of it.

    Raises:
        HeaderError: It is none, or its sum is wrong.
    """
    if end - begin < SIZE:
        return None
    magic, total = _LEAD.unpack_from(buffer, begin)
    if magic != MAGIC:
        raise HeaderError(f"it begins with {magic!r}, not {MAGIC!r}")
    version, *fields = _BODIES[0].unpack_from(buffer, begin + _LEAD.size)
    if version != VERSION:
        raise HeaderError(f"it is of version {version}, not {VERSION}")
    header = Header._make(fields)
    ndim = header.ndim
    if ndim > MAX_NDIM:
        raise HeaderError(f"it announces {ndim} dimensions")
    if begin + SIZE + 8 * ndim > end:
        return None
    if zlib.crc32(buffer[begin + _LEAD.size : begin + SIZE + 8 * ndim]) != total:
        raise HeaderError("its checksum is wrong")
    return header, _DIMENSIONS[ndim].unpack_from(buffer, begin + SIZE)
