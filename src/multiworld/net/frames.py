"""JSON frames: four bytes of length, then that many bytes of UTF-8 JSON. Shell.

The store and the control links use them. Every hello carries ``PROTOCOL_VERSION``, and
each side refuses any other version with an error that names both.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROTOCOL_VERSION = 2
"""Version of the handshake and of all messages."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Bytes in the body of a frame, at most."""

_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The received bytes are not a valid frame, or a message is too long for one."""


def encode(message: dict[str, Any]) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        FrameError: The message is longer than ``MAX_FRAME_BYTES``.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES} bytes")
    return _LENGTH.pack(len(body)) + body


def decode_length(prefix: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the length of the body that follows a prefix.

    Args:
        prefix: The first four bytes of a frame.
        limit: Longest body that is allowed, in bytes.

    Raises:
        FrameError: The prefix announces a longer body.
    """
    length: int = _LENGTH.unpack(prefix)[0]
    if length > limit:
        raise FrameError(
            f"frame announces {length} bytes, which is too long; "
            "the peer may not speak the multiworld protocol"
        )
    return length


def decode_body(body: bytes) -> dict[str, Any]:
    """Return the message in the body of a frame.

    Raises:
        FrameError: The body is not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError("frame body is not valid JSON") from error
    if not isinstance(message, dict):
        raise FrameError("frame body is not a JSON object")
    return message


@contextmanager
def refusing_wrong_fields() -> Iterator[None]:
    """Raise ``ValueError`` where a field of a message has a wrong type or is too large.

    Handlers of messages raise ``KeyError``, ``TypeError`` or ``ValueError`` for a wrong
    message. ``int(1e999)`` and ``[].get`` raise others, which are translated here.

    Returns:
        A context manager for the code that reads the message.

    Raises:
        ValueError: A number cannot be converted, or a field is not of its type.
    """
    try:
        yield
    except (ArithmeticError, AttributeError) as error:
        raise ValueError(f"wrong field in a message: {error!r}") from error


async def read(
    reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Read one frame.

    Args:
        reader: The stream to read from.
        limit: Longest body that is allowed, in bytes.

    Raises:
        FrameError: The frame is not valid, or too long.
        asyncio.IncompleteReadError: The connection ended within the frame.
        OSError: The connection failed.

    Cancellation:
        Not safe: a frame that was read in part is lost, so close the connection.
    """
    length = decode_length(await reader.readexactly(_LENGTH.size), limit)
    return decode_body(await reader.readexactly(length))
