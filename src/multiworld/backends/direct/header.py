"""The frame header of the direct data path. Pure.

Every frame is a header, then its payload. A message of up to ``FRAGMENT_BYTES`` is one
frame; a larger one is several, whose payloads follow each other. Layout, little-endian:

====== ===== ============ ======================================================
offset bytes field        meaning
====== ===== ============ ======================================================
0      4     magic        ``MWD1``
4      1     version      of this layout
5      1     kind         tensor, bundle, object, collective, fin, withdraw, memory,
                          bell
6      1     flags        1: last fragment · 2: the payload sum is set · 4: the payload
                          is in shared memory
7      1     dtype        code of the elements (``backends.dtypes``)
8      1     ndim         dimensions that follow the header (first fragment only)
9      1     slot         of the shared memory; of memory: how many there are
10     2     reserved     zero
12     8     nonce        of the incarnation
20     8     sequence     of the frame on its lane, from 0
28     8     tag          of the message; of a collective: its number
36     4     fragment     index in the message, from 0
40     4     payload      bytes of this frame behind the header
44     8     size         bytes of the whole message
52     4     label        bundle: bytes of manifest · collective: what it is
56     4     payload sum  CRC-32 of the payload, or 0
60     4     header sum   CRC-32 of the 60 bytes before and of the dimensions
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

_BODY = struct.Struct("<4sBBBBBB2xQQqIIQII")
_SUM = struct.Struct("<I")
SIZE = _BODY.size + _SUM.size
assert SIZE == 64

_DIMENSIONS = [struct.Struct(f"<{n}Q") for n in range(MAX_NDIM + 1)]


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
    body = _BODY.pack(MAGIC, VERSION, *header)
    dimensions = _DIMENSIONS[len(shape)].pack(*shape)
    return body + _SUM.pack(zlib.crc32(dimensions, zlib.crc32(body))) + dimensions


def peek_size(buffer: memoryview) -> int:
    """Return the length of the header at the start of ``buffer`` (``SIZE`` bytes).

    Raises:
        HeaderError: It cannot be one.
    """
    if buffer[:4] != MAGIC:
        raise HeaderError(f"it begins with {bytes(buffer[:4])!r}, not {MAGIC!r}")
    if buffer[4] != VERSION:
        raise HeaderError(f"it is of version {buffer[4]}, not {VERSION}")
    if buffer[8] > MAX_NDIM:
        raise HeaderError(f"it announces {buffer[8]} dimensions")
    return SIZE + 8 * buffer[8]


def decode(buffer: memoryview) -> tuple[Header, tuple[int, ...]]:
    """Return the header that fills ``buffer``, and its dimensions.

    Raises:
        HeaderError: Its sum is wrong.
    """
    _, _, *fields = _BODY.unpack_from(buffer)
    header = Header(*fields)
    dimensions = buffer[SIZE:]
    (total,) = _SUM.unpack_from(buffer, _BODY.size)
    if zlib.crc32(dimensions, zlib.crc32(buffer[: _BODY.size])) != total:
        raise HeaderError("its checksum is wrong")
    return header, _DIMENSIONS[header.ndim].unpack(dimensions)
