"""Limits on JSON from clients, and decoding that never blocks for long. Pure.

A body is decoded into declared types. A field of undeclared type first stays raw JSON
(``msgspec.Raw``), which allocates nothing, and is decoded only if it is small. The
numbers of a tensor are decoded in pieces, each of which holds the GIL for about 1 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from multiworld.errors import InvalidRequestError

T = TypeVar("T")

SMALL_BYTES = 16 * 1024  # maximum size of a field of undeclared type
MAX_OBJECTS = 4096  # maximum objects in a body without fields of undeclared type

# Maximum numbers of values, objects, lists and strings in a body with fields of
# undeclared type: 128 tools, the most that OpenAI's API takes, have thousands of
# objects. The maximum number of values is OpenAI's limit on token ids in a request.
MAX_VALUES, MAX_PARTS, MAX_LISTS, MAX_STRINGS = 300_000, 32_768, 16_384, 50_000

_LIMITS = {
    "objects": (b"{", MAX_PARTS),
    "lists": (b"[", MAX_LISTS),
    "values": (b",", MAX_VALUES),
}
"""The character to count and the maximum count, by name of the limit."""

# Errors of msgspec for invalid JSON, and for JSON of the wrong type.
NOT_JSON = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)

# Bytes to check in one step; the step that exceeds a limit is the last one.
CHECKED_BYTES = 256 * 1024
PIECE_BYTES = 64 * 1024  # bytes of numbers to decode at once
_NOTHING_ELSE = b"[] \t\r\n"  # characters to remove from a list of numbers


def decode(text: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"body is not a valid request: {error}") from error
    except NOT_JSON as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error


def check_objects(text: bytes | bytearray) -> None:
    """Check the number of objects before decoding."""
    if text.count(b"{") <= MAX_OBJECTS:
        return  # even with the braces in strings
    if count_outside_strings(text, b"{") > MAX_OBJECTS:
        raise _too_many(MAX_OBJECTS, "objects")


def count_outside_strings(text: bytes | bytearray, marks: bytes) -> int:
    """Return how often JSON has one of the characters ``marks`` outside strings."""
    return sum(outside.count(mark) for outside, _ in _outside(text) for mark in marks)


def check_values(text: bytes | bytearray) -> None:
    """Check the number of values outside strings, in 1 to 3 ms per megabyte."""
    counts = dict.fromkeys(_LIMITS, 0)
    for outside, quotes in _outside(text):
        if quotes // 2 > MAX_STRINGS:
            raise _too_many(MAX_STRINGS, "strings")
        for name, (mark, limit) in _LIMITS.items():
            counts[name] += outside.count(mark)
            if counts[name] > limit:
                raise _too_many(limit, name)


def _outside(text: bytes | bytearray) -> Iterator[tuple[bytes, int]]:
    """Yield JSON in pieces without strings, each with the number of quotes so far."""
    quotes = 0
    for piece in _unescaped(text):
        parts = piece.split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        yield outside, quotes


def _unescaped(text: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Yield JSON in pieces, without escaped quotes; no piece splits an escape."""
    has_escapes = b"\\" in text  # valid JSON has a backslash only within strings
    begin = 0
    while begin < len(text):
        piece = text[begin : begin + CHECKED_BYTES]
        if has_escapes:
            is_last = begin + len(piece) == len(text)
            if not is_last and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece = piece[:-1]
            yield piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        else:
            yield piece
        begin += len(piece)


def _too_many(limit: int, name: str) -> InvalidRequestError:
    return InvalidRequestError(f"body has more than {limit} {name}; split the request")


def small(part: msgspec.Raw, name: str, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the field ``name`` of a body; refuse it if it is large or invalid."""
    text = bytes(part)
    if len(text) > SMALL_BYTES:
        raise InvalidRequestError(f"{name} is longer than {SMALL_BYTES} bytes")
    try:
        return decoder.decode(text)
    except NOT_JSON as error:
        raise InvalidRequestError(f"{name} is not valid: {error}") from error


def pieces(numbers: bytes) -> Iterator[bytes]:
    flat = numbers.translate(None, _NOTHING_ELSE)
    begin = 0
    while begin < len(flat):
        end = flat.find(b",", begin + PIECE_BYTES)
        end = len(flat) if end < 0 else end
        yield b"[%b]" % flat[begin:end]
        begin = end + 1
