"""Frames: four bytes of length, then that many bytes of a message as JSON. Pure.

The store and the control links use them. Every hello carries ``PROTOCOL_VERSION``,
and each side refuses any other version with an error that names both.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

PROTOCOL_VERSION = 3
"""Version of the handshake and of all messages."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Bytes in the body of a frame, at most."""

_LENGTH = struct.Struct(">I")

_encoder = msgspec.json.Encoder()

T = TypeVar("T")


class FrameError(Exception):
    """The received bytes are not a valid frame, or a message is too long for one."""


def encode(message: msgspec.Struct) -> bytes:
    """Return ``message`` as one frame.

    Raises:
        FrameError: The message is longer than ``MAX_FRAME_BYTES``, or a text in it has
            a surrogate without its other half.
    """
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise FrameError(f"message is not Unicode text: {error}") from error
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


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the message in the body of a frame.

    Args:
        body: The body.
        decoder: Decoder of the messages that are expected.

    Raises:
        FrameError: The body is not JSON, or not one of these messages.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"frame body is not a valid message: {error}") from error
