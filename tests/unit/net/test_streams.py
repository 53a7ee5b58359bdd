"""Streams, plain and under TLS: exact reads, whole writes, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator

import pytest
import trustme

from multiworld import Tls
from multiworld.net.streams import (
    RECORD_BYTES,
    TlsStream,
    read_exactly,
    start_tls,
    wait_readable,
    wait_writable,
    write_all,
)
from tests.conftest import certificates
from tests.unit.waiting import turns

Ends = tuple[TlsStream, TlsStream]


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


@pytest.fixture
async def ends(tls: Tls) -> AsyncIterator[Ends]:
    ours, theirs = pair()
    found = await asyncio.gather(
        start_tls(ours, tls.context(is_server=False), is_server=False),
        start_tls(theirs, tls.context(is_server=True), is_server=True),
    )
    yield found
    for end in found:
        end.close()


async def test_read_waits_for_the_last_byte() -> None:
    ours, theirs = pair()
    with ours, theirs:
        reading = asyncio.create_task(read_exactly(ours, 4))
        for byte in b"abc":
            theirs.send(bytes([byte]))
            await turns(3)
        assert not reading.done()
        theirs.send(b"de")
        assert await reading == b"abcd"
        assert ours.recv(9) == b"e"


async def test_peer_that_closes_within_a_read_is_a_reset() -> None:
    """A torn message never passes for a short one."""
    ours, theirs = pair()
    with ours:
        theirs.send(b"ab")
        theirs.close()
        with pytest.raises(ConnectionResetError):
            await read_exactly(ours, 4)


async def test_write_waits_until_the_socket_takes_everything() -> None:
    ours, theirs = pair()
    data = os.urandom(4 << 20)
    with ours, theirs:
        writing = asyncio.create_task(write_all(ours, data))
        await turns(3)
        assert not writing.done()
        assert await read_exactly(theirs, len(data)) == data
        await writing


async def test_write_to_a_dead_peer_is_an_error() -> None:
    ours, theirs = pair()
    with ours:
        writing = asyncio.create_task(write_all(ours, bytes(4 << 20)))
        await turns(3)
        theirs.close()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            await writing


@pytest.mark.parametrize("wait", [wait_readable, wait_writable])
async def test_cancelled_wait_leaves_no_callback(wait: object) -> None:
    """The descriptor may be closed and reused after a cancelled wait."""
    ours, theirs = pair()
    assert callable(wait)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        with contextlib.suppress(BlockingIOError):
            while ours.send(bytes(4096)):
                pass
        waiting = asyncio.ensure_future(wait(ours))
        await turns(3)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(ours.fileno())
        assert not loop.remove_writer(ours.fileno())


# TLS.


async def test_tls_stream_carries_bytes_both_ways(ends: Ends) -> None:
    one, other = ends
    data = os.urandom(300_000)
    for sender, receiver in ((one, other), (other, one)):
        writing = asyncio.create_task(write_all(sender, data))
        assert await read_exactly(receiver, len(data)) == data
        await writing


async def test_tls_stream_with_nothing_to_read_would_block(ends: Ends) -> None:
    """It raises what a non-blocking socket raises, not TLS's own error."""
    with pytest.raises(BlockingIOError):
        ends[0].recv(1)
    with pytest.raises(BlockingIOError):
        ends[0].recvmsg_into([memoryview(bytearray(9))])


async def test_bytes_that_the_loop_cannot_see_are_pending(ends: Ends) -> None:
    """A short read leaves the rest of its record with OpenSSL."""
    one, other = ends
    one.send(b"0123456789")
    assert await read_exactly(other, 4) == b"0123"
    assert other.pending() == 6
    parts = [bytearray(4), bytearray(4)]
    assert other.recvmsg_into([memoryview(part) for part in parts]) == (6,)
    assert parts == [b"4567", b"89\0\0"]
    assert other.pending() == 0


@pytest.mark.parametrize(
    "sizes", [(10, 0, 20), (RECORD_BYTES, 1), (5, 3 * RECORD_BYTES, 7)]
)
async def test_pieces_are_sent_in_order(ends: Ends, sizes: tuple[int, ...]) -> None:
    """Small pieces share a record, long ones are split; the bytes stay in order."""
    one, other = ends
    pieces = [os.urandom(size) for size in sizes]
    whole = b"".join(pieces)
    assert one.sendmsg(pieces) == len(whole)
    assert await read_exactly(other, len(whole)) == whole


async def test_full_tls_stream_reports_how_much_it_accepted(ends: Ends) -> None:
    one, other = ends
    data = os.urandom(8 << 20)
    taken = one.sendmsg([data[:1], data[1:]])
    assert 0 < taken < len(data)
    with pytest.raises(BlockingIOError):
        one.sendmsg([data[taken:]])
    rest = asyncio.create_task(write_all(one, data[taken:]))
    assert await read_exactly(other, len(data)) == data
    await rest


async def test_peer_that_ends_without_a_tls_goodbye_ends_the_stream(ends: Ends) -> None:
    """A killed process sends no TLS goodbye, and its reader must not hang."""
    one, other = ends
    one.shutdown(socket.SHUT_RDWR)
    one.close()
    assert one.fileno() == -1
    with pytest.raises(OSError):  # noqa: PT011 - ssl.SSLError or ConnectionResetError
        await read_exactly(other, 1)
    assert other.family == socket.AF_UNIX


async def test_peer_without_a_certificate_of_ours_is_refused(
    tls: Tls, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = certificates(trustme.CA(), tmp_path_factory.mktemp("other"))
    ours, theirs = pair()
    found = await asyncio.gather(
        start_tls(ours, other.context(is_server=False), is_server=False),
        start_tls(theirs, tls.context(is_server=True), is_server=True),
        return_exceptions=True,
    )
    assert any(isinstance(error, ssl.SSLError) for error in found)
    assert all(isinstance(error, OSError) for error in found)
    assert (ours.fileno(), theirs.fileno()) == (-1, -1)


async def test_garbage_instead_of_tls_is_an_ssl_error(tls: Tls) -> None:
    """A peer without TLS is distinguished from a peer that has gone."""
    ours, theirs = pair()
    with theirs:
        theirs.send(b"\x00\x00\x00\x20 something else entirely")
        with pytest.raises(ssl.SSLError):
            await start_tls(ours, tls.context(is_server=True), is_server=True)
    assert ours.fileno() == -1


async def test_cancelled_handshake_closes_the_socket(tls: Tls) -> None:
    """A silent peer costs nothing once the caller gives up."""
    ours, theirs = pair()
    with theirs:
        starting = asyncio.create_task(
            start_tls(ours, tls.context(is_server=True), is_server=True)
        )
        await turns(3)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert theirs.recv(1) == b""
