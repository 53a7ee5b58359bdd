"""Reading a request's body within limits, and giving up when its client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from multiworld.errors import InvalidRequestError

T = TypeVar("T")

BODY_S = 30.0
"""How long a client may take to send a body."""


class TooLargeError(InvalidRequestError):
    """The body is larger than the gateway takes."""

    status = 413


class TooSlowError(InvalidRequestError):
    """The client takes too long to send its body."""

    status = 408


class ClientGoneError(InvalidRequestError):
    """The client hung up; nobody reads the answer."""

    status = 499


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """Return the body.

    Raises:
        TooLargeError, TooSlowError, ClientGoneError: As their names say.

    Cancellation: safe.
    """
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                parts.append(part)
    except TimeoutError:
        raise TooSlowError(f"the body did not arrive within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise ClientGoneError("the client has gone") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


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
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client has gone")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
