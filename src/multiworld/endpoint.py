"""Where a manager listens and how it dials others. Shell.

Control links, beats and data lanes all come in at one listener: a TCP port on the
interface in use and an abstract Unix socket for the same host. Each connection begins
with a handshake that says what it is for; see ``rendezvous.handshake``. A stranger that
sends garbage, or nothing, is hung up on, counted, and bothers nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import ssl
from collections import Counter
from typing import Any, Protocol

from multiworld.membership import Address, this_host
from multiworld.rendezvous import frames
from multiworld.rendezvous.handshake import (
    HELLO_BYTES,
    HELLO_S,
    MAX_GREETING,
    HandshakeError,
    accepting,
    dialing,
    refusal,
)
from multiworld.rendezvous.refusals import Refusals
from multiworld.security import Security
from multiworld.streams import (
    Stream,
    TlsStream,
    read_exactly,
    start_tls,
    wait_readable,
    write_all,
)
from multiworld.tcp import persist

logger = logging.getLogger("multiworld.watchdog")

Message = dict[str, Any]

BACKLOG = 1024
UNIX_BUFFER_BYTES = 1 << 20
"""Socket buffer on one host; Linux's default of 208 KiB makes a stream stop and go."""


class Acceptor(Protocol):
    """Who takes the connections that come in."""

    def refusal(self, hello: Message) -> str | None:
        """Say why a connection with this hello is unwanted, or None."""

    def take(self, stream: Stream, hello: Message) -> None:
        """Own the connection from now on."""


async def _read_frame(stream: Stream) -> Message:
    length = frames.decode_length(await read_exactly(stream, 4), HELLO_BYTES)
    return frames.decode_body(await read_exactly(stream, length))


def tune(sock: socket.socket) -> None:
    """Set a fresh connection's options: non-blocking, no delay, wide enough."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)


async def dial(address: Address, hello: Message, security: Security) -> Stream:
    """Connect to ``address``, shake hands and return the connection.

    Beats (``kind`` "beat") are sealed frame by frame and go without TLS: a helper
    process sends them.

    Raises:
        OSError: Nobody is there.
        HandshakeError: Somebody is who is not one of ours, or refused.

    Cancellation: safe; nothing stays open.
    """
    stream = await _connect(address)
    try:
        if security.tls is not None and hello["kind"] != "beat":
            assert isinstance(stream, socket.socket)
            context = security.tls.context(is_server=False)
            stream = await start_tls(stream, context, is_server=False)
        steps = dialing(hello, security)
        try:
            message = next(steps)
            while True:
                await write_all(stream, frames.encode(message))
                message = steps.send(await _read_frame(stream))
        except StopIteration:
            return stream
        except frames.FrameError as error:
            why = f"what answers there is no multiworld: {error}"
            raise HandshakeError("malformed", why) from error
    except BaseException:
        stream.close()
        raise


async def _connect(address: Address) -> Stream:
    loop = asyncio.get_running_loop()
    target: Any
    if address.is_on(this_host()):
        target = "\0" + address.unix
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        info = await loop.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )
        sock = socket.socket(info[0][0], socket.SOCK_STREAM)
        target = info[0][4]
    try:
        tune(sock)
        await loop.sock_connect(sock, target)
    except BaseException:
        sock.close()
        raise
    return sock


class Endpoint:
    """A manager's listener on one interface."""

    def __init__(
        self,
        address: Address,
        sockets: list[socket.socket],
        acceptor: Acceptor,
        security: Security,
    ) -> None:
        self.address = address
        self._sockets, self._acceptor, self._security = sockets, acceptor, security
        self._refusals = Refusals(logger, f"the listener on {address.host}")
        self._greeting: dict[asyncio.Task[None], None] = {}
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = {
            loop.create_task(self._listen(sock), name="multiworld endpoint")
            for sock in sockets
        }

    @classmethod
    def listen(cls, host: str, acceptor: Acceptor, security: Security) -> Endpoint:
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
        return cls(address, [tcp, unix], acceptor, security)

    @property
    def refused(self) -> Counter[str]:
        """How many connections were refused, by kind."""
        return self._refusals.counts

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        return [sock.fileno() for sock in self._sockets if sock.fileno() >= 0]

    def close_nowait(self) -> None:
        """Stop listening."""
        self._is_closed = True
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
            try:
                sock, where = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, or the dialer was gone again.
                logger.warning("could not accept a connection: %s", error)
                await asyncio.sleep(0.05)
                continue
            task = loop.create_task(self._greet(sock, where), name="multiworld hello")
            self._greeting[task] = None
            self._tasks.add(task)
            task.add_done_callback(self._greeted)
            if len(self._greeting) > MAX_GREETING:
                next(iter(self._greeting)).cancel()

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._greeting.pop(task, None)

    async def _greet(self, sock: socket.socket, where: object) -> None:
        """Shake hands and hand the connection over; hang up on all others."""
        refused = self._refusals
        stream: Stream = sock
        kept = False
        try:
            tune(sock)
            async with asyncio.timeout(HELLO_S):
                if self._security.tls is not None and await _speaks_tls(sock):
                    context = self._security.tls.context(is_server=True)
                    stream = await start_tls(sock, context, is_server=True)
                hello = await self._welcome(stream)
            self._acceptor.take(stream, hello)
            kept = True
        except HandshakeError as error:
            refused.add(error.kind, where, error)
        except TimeoutError:
            refused.add("slow", where, f"no hello within {HELLO_S:g} s")
        except asyncio.CancelledError:
            if self._is_closed:
                raise
            refused.add("crowded", where, "too many say hello at once")
        except ssl.SSLError as error:
            refused.add("tls", where, error)
        except OSError as error:
            refused.add("malformed", where, error)
        except (frames.FrameError, KeyError, TypeError, ValueError) as error:
            refused.add("malformed", where, repr(error))
        finally:
            if not kept:
                stream.close()

    async def _welcome(self, stream: Stream) -> Message:
        hello = await _read_frame(stream)
        is_plain = self._security.tls is not None and not isinstance(stream, TlsStream)
        if is_plain and hello.get("kind") != "beat":
            raise HandshakeError("tls", "it came without TLS")
        steps = accepting(hello, self._security)
        try:
            try:
                message = next(steps)
                while True:
                    await write_all(stream, frames.encode(message))
                    message = steps.send(await _read_frame(stream))
            except StopIteration as end:
                answer = end.value
            why = self._acceptor.refusal(hello)
            if why is not None:
                raise HandshakeError("refused", why, answer=refusal(why))
        except HandshakeError as error:
            if error.answer is not None:
                await write_all(stream, frames.encode(error.answer))
            raise
        await write_all(stream, frames.encode(answer))
        return hello


async def _speaks_tls(sock: socket.socket) -> bool:
    """Look at the first byte: TLS begins with 22, a frame of ours with a 0."""
    while True:
        try:
            return sock.recv(1, socket.MSG_PEEK) == b"\x16"
        except (BlockingIOError, InterruptedError):
            await wait_readable(sock)
