"""Request bodies: reading within limits, cancelling on disconnect. Shell."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from multiworld.errors import InvalidRequestError

T = TypeVar("T")

BODY_S = 30.0
"""Most seconds between two parts of a body."""

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""``zlib`` window bits of the supported encodings."""

GZIP_MAGIC = b"\x1f\x8b"
"""First bytes of each member of a gzip body (RFC 1952, section 2.3.1)."""

MAX_MEMBERS = 16
"""Most members of a gzip body; each costs a copy of the rest of the body."""


class TooLargeError(InvalidRequestError):
    """The body is larger than the gateway accepts."""

    status = 413


class TooSlowError(InvalidRequestError):
    """The client sends its body too slowly."""

    status = 408


class UnknownEncodingError(InvalidRequestError):
    """The encoding of the body is not supported."""

    status = 415


class ClientGoneError(InvalidRequestError):
    """The client disconnected; nobody reads the answer."""

    status = 499


async def read_body(
    request: Request,
    limit_bytes: int,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Return the decompressed body of a request.

    Args:
        request: The request.
        limit_bytes: Most bytes of the body, both as sent and decompressed.
        on_bytes: Called with the size of each part that arrives.

    Raises:
        TooLargeError: The body is larger than ``limit_bytes``.
        TooSlowError: No part of the body arrived for ``BODY_S``.
        ClientGoneError: The client disconnected.
        UnknownEncodingError: Its Content-Encoding is not supported.
        InvalidRequestError: The body cannot be decompressed.

    Cancellation: Safe. The body read so far is dropped.
    """
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > limit_bytes):
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S) as limit:
            async for part in request.stream():
                limit.reschedule(asyncio.get_running_loop().time() + BODY_S)
                size += len(part)
                on_bytes(len(part))
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                parts.append(part)
    except TimeoutError:
        why = f"no more of the body arrived for {BODY_S:g} s; send it faster"
        raise TooSlowError(why) from None
    except ClientDisconnect:
        raise ClientGoneError("client disconnected before the answer") from None
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return whole
    return await asyncio.to_thread(_unpacked, whole, encoding, limit_bytes)


def _unpacked(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Return the decompressed body.

    Raises:
        UnknownEncodingError: The encoding is not supported.
        TooLargeError: The decompressed body is larger than ``limit_bytes``.
        InvalidRequestError: The body cannot be decompressed, or is incomplete.
    """
    if encoding not in WINDOW_BITS:
        raise UnknownEncodingError(
            f"Content-Encoding {encoding!r} is not supported; send gzip, deflate or "
            "no compression"
        )
    plain = bytearray()
    for _ in range(MAX_MEMBERS):
        reader = zlib.decompressobj(WINDOW_BITS[encoding])
        try:
            plain += reader.decompress(body, limit_bytes + 1 - len(plain))
        except zlib.error as error:
            text = f"body is not valid {encoding}: {error}"
            raise InvalidRequestError(text) from error
        if len(plain) > limit_bytes:
            raise _too_large(limit_bytes)
        if not reader.eof:
            raise InvalidRequestError(f"{encoding} body is incomplete; send all of it")
        body = reader.unused_data
        if encoding != "gzip" or not body.startswith(GZIP_MAGIC):
            return bytes(plain)
    raise InvalidRequestError(
        f"gzip body has more than {MAX_MEMBERS} members; compress it as one"
    )


def _too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"body is larger than {limit_bytes / 2**20:g} MiB; send less, or raise "
        "gateway.max_body_mb"
    )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it when the client disconnects.

    Raises:
        ClientGoneError: The client disconnected.

    Cancellation: Safe. ``work`` is cancelled, too.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("client disconnected before the answer")
    finally:
        for one in (task, disconnected):
            one.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
