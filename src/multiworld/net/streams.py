"""Connected sockets, plain or under TLS, for code that reads and writes at once. Shell.

A ``TlsStream`` has the methods of a non-blocking socket that lanes and links use, and
like it raises ``BlockingIOError`` where it would have to wait. What OpenSSL has
decrypted and not given out yet is ``pending``: the loop does not see it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

RECORD_BYTES = 16 * 1024
"""What one TLS record carries at most."""


class Stream(Protocol):
    """What lanes and links need of a connection; a non-blocking socket has it."""

    @property
    def family(self) -> int:
        """The address family."""

    def fileno(self) -> int:
        """Return the descriptor, or -1 once closed."""

    def recv(self, size: int, /) -> bytes:
        """Return what has arrived, at most ``size`` bytes; nothing at the end."""

    def recvmsg_into(self, buffers: Sequence[memoryview], /) -> tuple[Any, ...]:
        """Read into buffers, one after the other; the first item is the count."""

    def send(self, data: bytes | bytearray | memoryview, /) -> int:
        """Write; return how much was taken."""

    def sendmsg(self, pieces: Sequence[bytes | memoryview], /) -> int:
        """Write several pieces; return how much was taken."""

    def shutdown(self, how: int, /) -> None:
        """End one direction."""

    def close(self) -> None:
        """Hang up."""


class TlsStream:
    """A connection under TLS, after its handshake.

    What was not taken must be offered again first, as OpenSSL demands; both users keep
    their order, so they do.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    @property
    def family(self) -> int:
        """The address family."""
        return self._sock.family

    def fileno(self) -> int:
        """Return the descriptor, or -1 once closed."""
        return self._sock.fileno()

    def pending(self) -> int:
        """Return how many bytes can be read though the loop sees nothing."""
        return self._sock.pending()

    def recv(self, size: int, /) -> bytes:
        """Return what has arrived, at most ``size`` bytes; nothing at the end."""
        try:
            return self._sock.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recvmsg_into(self, buffers: Sequence[memoryview], /) -> tuple[Any, ...]:
        """Read into buffers, one after the other; the first item is the count."""
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
        """Write at most one record; return how much was taken."""
        try:
            return self._sock.send(memoryview(data)[:RECORD_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def sendmsg(self, pieces: Sequence[bytes | memoryview], /) -> int:
        """Write several pieces; return how much was taken."""
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
        """End one direction of the connection below."""
        self._sock.shutdown(how)

    def close(self) -> None:
        """Hang up."""
        self._sock.close()


async def _ready(
    fd: int,
    add: Callable[..., object],
    remove: Callable[[int], object],
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
    """Wait until something can be read."""
    loop = asyncio.get_running_loop()
    await _ready(sock.fileno(), loop.add_reader, loop.remove_reader)


async def wait_writable(sock: socket.socket | Stream) -> None:
    """Wait until something can be written."""
    loop = asyncio.get_running_loop()
    await _ready(sock.fileno(), loop.add_writer, loop.remove_writer)


async def read_exactly(stream: Stream, count: int) -> bytes:
    """Read so many bytes.

    Raises:
        ConnectionResetError: The other side hung up before.
    """
    data = b""
    while len(data) < count:
        try:
            chunk = stream.recv(count - len(data))
        except (BlockingIOError, InterruptedError):
            await wait_readable(stream)
            continue
        if not chunk:
            raise ConnectionResetError("hung up during the hello")
        data += chunk
    return data


async def write_all(stream: Stream, data: bytes) -> None:
    """Write everything."""
    while data:
        try:
            data = data[stream.send(data) :]
        except (BlockingIOError, InterruptedError):
            await wait_writable(stream)


async def start_tls(
    sock: socket.socket, context: ssl.SSLContext, *, is_server: bool
) -> TlsStream:
    """Shake hands; ``sock`` belongs to what is returned.

    Raises:
        ssl.SSLError: The other side has no certificate that we trust, or no TLS.
    """
    wrapped = context.wrap_socket(
        sock, server_side=is_server, do_handshake_on_connect=False
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
