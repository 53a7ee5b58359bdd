"""Request bodies: reading within limits, cancelling on disconnect."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.http.body_limits import (
    BodyLimits,
    Reservation,
    TooSlowError,
    limit_s,
)
from multiworld.serve.gateway.http.http_request import (
    CONNECTION,
    IS_COMPLETE,
    AnyRequest,
    Connection,
)
from multiworld.serve.gateway.http.json_limits import NOT_JSON, SMALL_BYTES

T = TypeVar("T")

# ``zlib`` window bits of the supported encodings.
WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}

GZIP_MAGIC = b"\x1f\x8b"  # starts each member of a gzip body (RFC 1952, 2.3.1)
# Maximum members of a gzip body; after each member, zlib copies the rest of the input.
MAX_MEMBERS = 16

# Maximum bytes, compressed and decompressed, to decompress on the event loop itself,
# which takes less than 1 ms. A thread decompresses the rest.
FIRST_BYTES = 64 * 1024

OFFLOAD_BYTES = 64 * 1024  # bodies of at least this size are parsed in a thread
STEP_BYTES = 1024 * 1024  # maximum bytes, in and out, of a decompression step
JSON_LENGTH = "inference-header-content-length"  # header: length of the JSON part
MAX_DIGITS = 18  # a length with this many digits or more is too large to be parsed

GONE = "client disconnected before the answer"

Body = bytes | bytearray


class UnknownEncodingError(InvalidRequestError):
    status = 415


class ClientGoneError(InvalidRequestError):
    status = 499


async def read_body(
    request: AnyRequest,
    limits: BodyLimits,
    reservation: Reservation,
    on_bytes: Callable[[int], None] = lambda size: None,
    on_unpacked: Callable[[int], None] = lambda size: None,
    *,
    may_be_binary: bool = False,  # binary data may follow JSON of a declared length
) -> Body:
    """Read and decompress the body of a request, within the limits."""
    is_binary = may_be_binary and JSON_LENGTH in request.headers
    check = partial(limits.check, is_binary=is_binary)
    for header in ("content-length", *([JSON_LENGTH] if is_binary else [])):
        declared = request.headers.get(header, "")
        if declared.isdecimal() and declared.isascii():
            size = int(declared[:MAX_DIGITS]) if len(declared) < MAX_DIGITS else 2**62
            limits.check(size, is_binary=is_binary and header != JSON_LENGTH)
    whole = await _received(request, check, reservation, on_bytes)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return whole
    plain = bytearray()
    try:
        await _unpack(whole, encoding, plain, check, reservation)
    finally:
        # Count the bytes even if the body is refused.
        on_unpacked(max(0, len(plain) - len(whole)))
    reservation.remove(len(whole))
    return plain


async def _received(
    request: AnyRequest,
    check: Callable[[int], None],
    reservation: Reservation,
    on_bytes: Callable[[int], None],
) -> Body:
    whole: Body = b""

    async def read() -> bool:
        """Add the next part; return whether it is the last."""
        nonlocal whole
        event = await request.receive()
        if event["type"] == "http.disconnect":
            raise ClientGoneError(GONE)
        part = event.get("body", b"")
        on_bytes(len(part))
        check(len(whole) + len(part))
        reservation.add(len(part))
        if not whole:
            whole = part
        elif isinstance(whole, bytearray):
            whole += part
        else:
            whole = bytearray(whole) + part
        return not event.get("more_body", False)

    if IS_COMPLETE in request.scope and await read():
        return whole
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    try:
        async with asyncio.timeout_at(began_at + limit_s(0)) as limit:
            while not await read():
                limit.reschedule(began_at + limit_s(len(whole)))
    except TimeoutError:
        raise TooSlowError(
            f"{len(whole)} bytes of the body arrived in "
            f"{loop.time() - began_at:.0f} s; send it faster"
        ) from None
    return whole


async def _unpack(
    body: Body,
    encoding: str,
    plain: bytearray,
    check: Callable[[int], None],
    reservation: Reservation,
) -> None:
    """Decompress a body into ``plain``; use a thread, in steps, if it is large."""
    if encoding not in WINDOW_BITS:
        raise UnknownEncodingError(
            f"Content-Encoding {encoding!r} is not supported; send gzip, deflate or "
            "no compression"
        )
    packed, at = memoryview(body), 0
    for _ in range(MAX_MEMBERS):
        reader = zlib.decompressobj(WINDOW_BITS[encoding])
        while not reader.eof:
            given: Body | memoryview = reader.unconsumed_tail
            if not given:
                given = packed[at : at + (STEP_BYTES if at else FIRST_BYTES)]
                at += len(given)
            try:
                if at <= FIRST_BYTES and not plain:
                    part = reader.decompress(given, FIRST_BYTES)
                else:
                    part = await asyncio.to_thread(reader.decompress, given, STEP_BYTES)
            except zlib.error as error:
                text = f"body is not valid {encoding}: {error}"
                raise InvalidRequestError(text) from error
            if not part and not given and not reader.eof:
                raise InvalidRequestError(
                    f"{encoding} body is incomplete; send all of it"
                )
            check(len(plain) + len(part))
            reservation.add(len(part))
            plain += part
        at -= len(reader.unused_data)
        if encoding != "gzip" or packed[at : at + 2] != GZIP_MAGIC:
            return
    raise InvalidRequestError(
        f"gzip body has more than {MAX_MEMBERS} members; compress it as one"
    )


async def while_connected(request: AnyRequest, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it when the client disconnects."""
    connection: Connection = request.scope.get(CONNECTION) or Connection()
    if connection.is_lost:
        work.close()
        raise ClientGoneError(GONE)
    task = asyncio.current_task()
    assert task is not None
    cancelled_before = task.cancelling()
    is_gone = False

    def gone() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    connection.on_lost.add(gone)
    try:
        return await work
    except asyncio.CancelledError:
        # As in asyncio.timeout: convert only our own cancellation into an error.
        if is_gone and task.uncancel() <= cancelled_before:
            raise ClientGoneError(GONE) from None
        raise
    finally:
        connection.on_lost.discard(gone)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return ``work()``; run it in a thread if ``size`` is at least ``OFFLOAD_BYTES``.

    Cancelling waits until the thread ends, because the thread uses the body.
    """
    if size < OFFLOAD_BYTES:
        return work()
    parsing = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(parsing)
    except asyncio.CancelledError:
        await asyncio.gather(parsing, return_exceptions=True)
        raise


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


_named = msgspec.json.Decoder(_Named)
_name = msgspec.json.Decoder(str)


def model_named_in(body: Body) -> str:
    """Return the model that a body names, even if other fields are invalid."""
    try:
        found = bytes(_named.decode(body).model)
        return _name.decode(found) if len(found) <= SMALL_BYTES else ""
    except NOT_JSON:
        return ""
