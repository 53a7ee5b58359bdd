"""JSON frames: four bytes of length, then that many bytes of UTF-8 JSON.

The store and the control links speak in them. ``PROTOCOL_VERSION`` stands in every
hello; both sides refuse another one by name.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 16 * 1024 * 1024
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """What arrived is not a frame of ours."""


def encode(message: dict[str, Any]) -> bytes:
    """Return ``message`` as one frame."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {len(body)} bytes is over {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_length(prefix: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the length of the body that follows ``prefix`` (four bytes)."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > limit:
        raise FrameError(f"a frame announces {length} bytes; it is not one of ours")
    return length


def decode_body(body: bytes) -> dict[str, Any]:
    """Return the message in ``body``."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("a frame does not hold JSON") from error
    if not isinstance(message, dict):
        raise FrameError("a frame does not hold a JSON object")
    return message


async def read(
    reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Read one frame of at most ``limit`` bytes.

    Raises:
        FrameError: It is not one of ours.
        asyncio.IncompleteReadError, OSError: The connection ended.
    """
    length = decode_length(await reader.readexactly(_LENGTH.size), limit)
    return decode_body(await reader.readexactly(length))
