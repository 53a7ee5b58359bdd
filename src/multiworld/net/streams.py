"""Non-blocking streams: connected sockets, plain or under TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from multiworld.net.forks import closed_in_forks

RECORD_BYTES = 16 * 1024  # maximum payload of one TLS record (RFC 8446)


class Stream(Protocol):
    """A connection, as lanes and links use it; a non-blocking socket is one. Reads and
    writes raise ``BlockingIOError`` instead of waiting."""

    @property
    def family(self) -> int:
        """The address family."""

    def fileno(self) -> int:
        """Return the descriptor, or -1 once closed."""

    def recv(self, size: int, /) -> bytes:
        """Return at most ``size`` received bytes; none at the end of the stream."""

    def recvmsg_into(self, buffers: Sequence[memoryview], /) -> tuple[Any, ...]:
        """Fill buffers in order; the first item returned is the number of bytes."""

    def send(self, data: bytes | bytearray | memoryview, /) -> int:
        """Write; return the number of bytes taken."""

    def sendmsg(self, pieces: Sequence[bytes | memoryview], /) -> int:
        """Write several pieces; return the number of bytes taken."""

    def shutdown(self, how: int, /) -> None:
        """Shut down one direction; ``how`` is as for ``socket.shutdown``."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        """Set an option of the socket below."""

    def close(self) -> None:
        """Close the connection."""


class TlsStream:
    """A connection under TLS, after its TLS handshake."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        # After a partial write, OpenSSL requires the same bytes again, so the caller
        # must write them before any others.
        self._sock = sock

    @property
    def family(self) -> int:
        return self._sock.family

    def fileno(self) -> int:
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        self._sock.setsockopt(level, option, value)

    def pending(self) -> int:
        """Return the number of decrypted bytes, which the event loop cannot see."""
        return self._sock.pending()

    def recv(self, size: int, /) -> bytes:
        try:
            return self._sock.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recvmsg_into(self, buffers: Sequence[memoryview], /) -> tuple[Any, ...]:
        count = 0
        for buffer in buffers:
            try:
                read = self._sock.recv_into(buffer)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if count:
                    break
                raise BlockingIOError from error
            count += read
            if read < len(buffer) or not self._sock.pending():
                break
        return (count,)

    def send(self, data: bytes | bytearray | memoryview, /) -> int:
        """Write at most one TLS record; return the number of bytes taken."""
        try:
            return self._sock.send(memoryview(data)[:RECORD_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def sendmsg(self, pieces: Sequence[bytes | memoryview], /) -> int:
        if sum(map(len, pieces)) <= RECORD_BYTES:
            return self.send(b"".join(pieces))
        written = 0
        for piece in pieces:
            view = memoryview(piece)
            while len(view):
                try:
                    taken = self.send(view)
                except BlockingIOError:
                    if written:
                        return written
                    raise
                written += taken
                view = view[taken:]
        return written

    def shutdown(self, how: int, /) -> None:
        """Shut down one direction of the socket below, without a TLS close alert."""
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


async def _ready(
    fd: int, add: Callable[..., object], remove: Callable[[int], object]
) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    add(fd, wake)
    try:
        await future
    finally:
        remove(fd)


async def wait_readable(sock: socket.socket | Stream) -> None:
    """Wait until bytes can be read, or the connection has ended."""
    loop = asyncio.get_running_loop()
    await _ready(sock.fileno(), loop.add_reader, loop.remove_reader)


async def wait_writable(sock: socket.socket | Stream) -> None:
    """Wait until bytes can be written, or the connection has ended."""
    loop = asyncio.get_running_loop()
    await _ready(sock.fileno(), loop.add_writer, loop.remove_writer)


async def read_exactly(stream: Stream, count: int) -> bytes:
    """Read exactly ``count`` bytes. If cancelled, some may be lost: close the
    stream."""
    data = b""
    while len(data) < count:
        try:
            chunk = stream.recv(count - len(data))
        except (BlockingIOError, InterruptedError):
            await wait_readable(stream)
            continue
        if not chunk:
            raise ConnectionResetError("the peer closed the connection in a handshake")
        data += chunk
    return data


async def write_all(stream: Stream, data: bytes) -> None:
    """Write all of ``data``. If cancelled, a part may be sent: close the stream."""
    while data:
        try:
            data = data[stream.send(data) :]
        except (BlockingIOError, InterruptedError):
            await wait_writable(stream)


async def start_tls(
    sock: socket.socket, context: ssl.SSLContext, *, is_server: bool
) -> TlsStream:
    """Do the TLS handshake; return the stream that owns ``sock``, or close it."""
    wrapped = closed_in_forks(
        context.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False)
    )
    try:
        while True:
            try:
                wrapped.do_handshake()
            except ssl.SSLWantReadError:
                await wait_readable(wrapped)
            except ssl.SSLWantWriteError:
                await wait_writable(wrapped)
            else:
                return TlsStream(wrapped)
    except BaseException:
        wrapped.close()
        raise
