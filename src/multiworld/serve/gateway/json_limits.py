"""Limits on JSON from clients, and decoding that never blocks for long. Pure.

A body is decoded into declared types. Parts of any type are cut out as text first
(``msgspec.Raw``), which allocates nothing, and are decoded only if they are small.
Numbers of tensors are decoded in pieces: each holds the GIL for about a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from multiworld.errors import InvalidRequestError

T = TypeVar("T")

SMALL_BYTES = 16 * 1024
"""Most bytes of a part of a body that may be of any type, such as parameters."""

MAX_OBJECTS = 4096
"""Most objects in a body."""

MAX_VALUES, MAX_LISTS, MAX_STRINGS = 300_000, 16_384, 50_000
"""Most values, lists and strings in a body whose parts may be of any type. As many
values as OpenAI allows token ids in a request."""

NOT_JSON = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""Errors of msgspec for a text that is not JSON, or not of the expected type."""

PIECE_BYTES = 64 * 1024
"""Bytes of numbers that are decoded at once."""

_NOTHING_ELSE = b"[] \t\r\n"
"""Bytes of a valid list of numbers that are not part of its numbers or commas."""


def decode(text: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the decoded text.

    Raises:
        InvalidRequestError: The text is not JSON, or does not fit the type.
    """
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"body is not a valid request: {error}") from error
    except NOT_JSON as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error


def check_objects(text: bytes | bytearray) -> None:
    """Check that a body has few objects, before it is decoded.

    Braces within texts count as well.

    Raises:
        InvalidRequestError: It has more than ``MAX_OBJECTS``.
    """
    if text.count(b"{") > MAX_OBJECTS:
        raise InvalidRequestError(
            f"body has more than {MAX_OBJECTS} objects; split the request"
        )


def check_values(text: bytes | bytearray) -> None:
    """Check that a body has few values, whatever its type, before it is decoded.

    What is within strings does not count. This takes 1 to 3 ms for a megabyte.

    Raises:
        InvalidRequestError: It has more values of a kind than a request may.
    """
    plain: bytes | bytearray = text
    if b"\\" in text:  # which valid JSON has within strings only
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings > MAX_STRINGS:
        raise _too_many(strings, MAX_STRINGS, "strings")
    outside = b"".join(plain.split(b'"')[::2])
    counts = {
        "objects": (b"{", MAX_OBJECTS),
        "lists": (b"[", MAX_LISTS),
        "values": (b",", MAX_VALUES),
    }
    for name, (mark, most) in counts.items():
        if (count := outside.count(mark)) > most:
            raise _too_many(count, most, name)


def _too_many(count: int, most: int, name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"body has {count} {name}, more than {most}; split the request"
    )


def small(part: msgspec.Raw, name: str, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the decoded part of a body.

    Args:
        part: The part.
        name: Its name, for the error.
        decoder: Decoder of its type.

    Raises:
        InvalidRequestError: The part is too large, or does not fit the type.
    """
    text = bytes(part)
    if len(text) > SMALL_BYTES:
        raise InvalidRequestError(f"{name} is longer than {SMALL_BYTES} bytes")
    try:
        return decoder.decode(text)
    except NOT_JSON as error:
        raise InvalidRequestError(f"{name} is not valid: {error}") from error


def pieces(numbers: bytes) -> Iterator[bytes]:
    """Split a list of numbers, nested or flat, into flat lists of about 64 KiB.

    Args:
        numbers: A valid JSON list.
    """
    flat = numbers.translate(None, _NOTHING_ELSE)
    begin = 0
    while begin < len(flat):
        end = flat.find(b",", begin + PIECE_BYTES)
        end = len(flat) if end < 0 else end
        yield b"[%b]" % flat[begin:end]
        begin = end + 1
