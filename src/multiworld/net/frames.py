"""Frames: four bytes of length, then that many bytes of a JSON message. Pure. Every
hello carries ``PROTOCOL_VERSION``, and each side refuses any other version."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

PROTOCOL_VERSION = 4  # version of the handshake and of all messages
MAX_FRAME_BYTES = 16 * 1024 * 1024  # maximum bytes of a frame's body

_LENGTH = struct.Struct(">I")

_encoder = msgspec.json.Encoder()

T = TypeVar("T")


class FrameError(Exception):
    """The received bytes are not a valid frame, or a message does not fit into one."""


def encode(message: msgspec.Struct) -> bytes:
    """Return a frame; ``FrameError`` if it is too large or has a lone surrogate."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise FrameError(f"message is not Unicode text: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES} bytes")
    return _LENGTH.pack(len(body)) + body


def decode_length(prefix: bytes, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the body's length, from the first four bytes of a frame."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > limit:
        raise FrameError(
            f"frame announces {length} bytes, which is too long; "
            "the peer may not speak the multiworld protocol"
        )
    return length


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"frame body is not a valid message: {error}") from error
