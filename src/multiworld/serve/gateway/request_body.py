"""Reading a request's body within limits, and giving up when its client has gone."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from multiworld.errors import InvalidRequestError

T = TypeVar("T")

BODY_S = 30.0
"""How long a client may send nothing of a body that is not complete."""

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class TooLargeError(InvalidRequestError):
    """The body is larger than the gateway takes."""

    status = 413


class TooSlowError(InvalidRequestError):
    """The client takes too long to send its body."""

    status = 408


class UnknownEncodingError(InvalidRequestError):
    """The body is compressed in a way that is not known here."""

    status = 415


class ClientGoneError(InvalidRequestError):
    """The client hung up; nobody reads the answer."""

    status = 499


async def read_body(
    request: Request,
    limit_bytes: int,
    on_bytes: Callable[[int], None] = lambda size: None,
) -> bytes:
    """Return the body.

    Args:
        took: Called with the size of each part, whatever becomes of the whole.

    Raises:
        TooLargeError, TooSlowError, ClientGoneError: As their names say.

    Cancellation: safe.
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
        why = f"nothing more of the body arrived within {BODY_S:g} s"
        raise TooSlowError(why) from None
    except ClientDisconnect:
        raise ClientGoneError("the client has gone") from None
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return whole
    return await asyncio.to_thread(_unpacked, whole, encoding, limit_bytes)


def _unpacked(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Return what a compressed body holds, if it is within the limit.

    Raises:
        UnknownEncodingError, TooLargeError, InvalidRequestError: As their names say.
    """
    if encoding not in WINDOW_BITS:
        raise UnknownEncodingError(
            f"Content-Encoding {encoding!r} is not known here; send gzip, deflate, or "
            "none"
        )
    reader = zlib.decompressobj(WINDOW_BITS[encoding])
    try:
        plain = reader.decompress(body, limit_bytes + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is no {encoding}: {error}") from error
    if len(plain) > limit_bytes:
        raise _too_large(limit_bytes)
    if not reader.eof:
        raise InvalidRequestError(f"the body is {encoding} that ends too early")
    return plain


def _too_large(limit_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the body is larger than {limit_bytes / 2**20:g} MiB (gateway.max_body_mb)"
    )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; cancel it when the client hangs up.

    Raises:
        ClientGoneError: It has.

    Cancellation: ``work`` is cancelled, too.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client has gone")
    finally:
        for one in (task, disconnected):
            one.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
