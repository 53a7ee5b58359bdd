"""Where a manager listens and how it dials others. Shell.

Control links, beats and data lanes all come in at one listener: a TCP port on the
interface in use and an abstract Unix socket for the same host. Each connection begins
with a hello that says what it is for; the answer is yes or why not. A stranger that
sends garbage, or nothing, is hung up on and bothers nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from typing import Any, Protocol

from multiworld.membership import Address, this_host
from multiworld.rendezvous import frames
from multiworld.tcp import persist

logger = logging.getLogger("multiworld.watchdog")

Message = dict[str, Any]

HELLO_S = 5.0
"""Seconds a connection has to say hello."""

MAX_GREETING = 128
"""Most connections that may be saying hello at once; more wait in the backlog."""

BACKLOG = 1024
UNIX_BUFFER_BYTES = 1 << 20
"""Socket buffer on one host; Linux's default of 208 KiB makes a stream stop and go."""


class Acceptor(Protocol):
    """Who takes the connections that come in."""

    def refusal(self, hello: Message) -> str | None:
        """Say why a connection with this hello is unwanted, or None."""

    def take(self, sock: socket.socket, hello: Message) -> None:
        """Own the connection from now on."""


class HelloError(ConnectionRefusedError):
    """The other side's answer to our hello was no."""


async def _read_frame(sock: socket.socket) -> Message:
    loop = asyncio.get_running_loop()

    async def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = await loop.sock_recv(sock, count - len(data))
            if not chunk:
                raise ConnectionResetError("hung up during the hello")
            data += chunk
        return data

    return frames.decode_body(await exactly(frames.decode_length(await exactly(4))))


def tune(sock: socket.socket) -> None:
    """Set a fresh connection's options: non-blocking, no delay, wide enough."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)


async def dial(address: Address, hello: Message) -> socket.socket:
    """Connect to ``address``, say ``hello`` and return the connection.

    Raises:
        OSError: Nobody is there.
        HelloError: Somebody is, and refused.

    Cancellation: safe; nothing stays open.
    """
    loop = asyncio.get_running_loop()
    if address.is_on(this_host()):
        family, target = socket.AF_UNIX, "\0" + address.unix
        sock = socket.socket(family, socket.SOCK_STREAM)
    else:
        info = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
        sock = socket.socket(info[0][0], socket.SOCK_STREAM)
        target = info[0][4]  # type: ignore[assignment]
    try:
        tune(sock)
        await loop.sock_connect(sock, target)
        greeting = {"multiworld": frames.PROTOCOL_VERSION, **hello}
        await loop.sock_sendall(sock, frames.encode(greeting))
        try:
            answer = await _read_frame(sock)
        except frames.FrameError as error:
            raise HelloError(f"what answers there is no multiworld: {error}") from error
        if not answer.get("ok"):
            raise HelloError(str(answer.get("error", "no reason given")))
    except BaseException:
        sock.close()
        raise
    return sock


class Endpoint:
    """A manager's listener on one interface."""

    def __init__(
        self, address: Address, sockets: list[socket.socket], acceptor: Acceptor
    ) -> None:
        self.address = address
        self._sockets, self._acceptor = sockets, acceptor
        self._greeting = asyncio.Semaphore(MAX_GREETING)
        loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = {
            loop.create_task(self._listen(sock), name="multiworld endpoint")
            for sock in sockets
        }

    @classmethod
    def listen(cls, host: str, acceptor: Acceptor) -> Endpoint:
        """Listen on a free port of ``host`` and on a Unix name of our own.

        Raises:
            OSError: ``host`` is not an address of this host.
        """
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        tcp = socket.create_server(
            info[0][4][:2],
            family=info[0][0],
            backlog=BACKLOG,
        )
        tcp.setblocking(False)
        name = f"multiworld-{secrets.token_hex(12)}"
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind("\0" + name)
        unix.listen(BACKLOG)
        unix.setblocking(False)
        where = this_host()
        address = Address(
            host=host,
            port=tcp.getsockname()[1],
            unix=name,
            boot=where.boot,
            netns=where.netns,
        )
        return cls(address, [tcp, unix], acceptor)

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        return [sock.fileno() for sock in self._sockets if sock.fileno() >= 0]

    def close_nowait(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            with contextlib.suppress(OSError, ValueError):
                loop.remove_reader(sock.fileno())
            sock.close()

    async def close(self) -> None:
        """Stop listening, and wait until every greeting has ended."""
        self.close_nowait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._greeting.acquire()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, or the dialer was gone again.
                self._greeting.release()
                logger.warning("could not accept a connection: %s", error)
                await asyncio.sleep(0.05)
                continue
            task = loop.create_task(self._greet(sock), name="multiworld hello")
            self._tasks.add(task)
            task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._greeting.release()

    async def _greet(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        kept = False
        try:
            tune(sock)
            async with asyncio.timeout(HELLO_S):
                hello = await _read_frame(sock)
                error = _wrong_version(hello) or self._acceptor.refusal(hello)
                answer: Message = {"ok": error is None, "error": error}
                await loop.sock_sendall(sock, frames.encode(answer))
            if error is not None:
                logger.info("refused a connection: %s", error)
                return
            self._acceptor.take(sock, hello)
            kept = True
        except (OSError, frames.FrameError, TimeoutError) as failure:
            logger.info("a connection ended during its hello: %r", failure)
        except (KeyError, TypeError, ValueError) as failure:
            logger.warning("refused a connection with a malformed hello: %r", failure)
        finally:
            if not kept:
                sock.close()


def _wrong_version(hello: Message) -> str | None:
    theirs, ours = hello.get("multiworld"), frames.PROTOCOL_VERSION
    if theirs == ours:
        return None
    return f"we speak protocol version {ours}, you {theirs}"
