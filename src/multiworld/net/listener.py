"""Where strangers knock: accepting, shaking hands, refusing. Shell.

A ``Listener`` accepts on some sockets and hands over only connections whose handshake
is done. Everybody else is hung up on, counted, logged now and then, and bothers nobody:
a slow one is given up after ``HELLO_S``, and where too many are at it at once, the one
that has taken longest goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from typing import Any, Protocol

from multiworld.net import frames
from multiworld.net.handshake import (
    HELLO_BYTES,
    HELLO_S,
    MAX_GREETING,
    HandshakeError,
    accepting,
    refusal,
)
from multiworld.net.refusals import Refusals
from multiworld.net.security import Security
from multiworld.net.streams import (
    Stream,
    TlsStream,
    read_exactly,
    start_tls,
    wait_readable,
    write_all,
)
from multiworld.net.tcp import tune

Message = dict[str, Any]

ACCEPTS_A_TURN = 16
"""Connections that are accepted before the loop's other tasks get their turn."""


class Acceptor(Protocol):
    """Who takes the connections that come in."""

    def security_for(self, hello: Message) -> Security | None:
        """Say what a connection with this hello must show; None: what all must, under
        TLS where that is on. Anything else goes without TLS.

        Raises:
            HandshakeError: It is unwanted in any case.
        """

    def refusal(self, hello: Message) -> str | None:
        """Say why a connection with this hello is unwanted, or None."""

    def take(self, stream: Stream, hello: Message) -> None:
        """Own the connection from now on."""

    def turned_away(self, hello: Message, error: HandshakeError, where: object) -> None:
        """Hear of one whose hello could be read, and who was refused."""


async def read_frame(stream: Stream, limit: int = HELLO_BYTES) -> Message:
    """Read one frame of at most ``limit`` bytes."""
    length = frames.decode_length(await read_exactly(stream, 4), limit)
    return frames.decode_body(await read_exactly(stream, length))


class Listener:
    """Listens until it is closed.

    Args:
        sockets: Bound and listening; taken over.
        acceptor: Who takes what comes in.
        security: What everybody must show.
        logger: Where refusals go.
        what: What is being knocked at, for the log.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        acceptor: Acceptor,
        security: Security,
        logger: logging.Logger,
        what: str,
    ) -> None:
        self._sockets, self._acceptor, self._security = sockets, acceptor, security
        self._logger = logger
        self._refusals = Refusals(logger, what)
        self._greeting: dict[asyncio.Task[None], socket.socket] = {}
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self._listening = [
            loop.create_task(self._listen(sock), name="multiworld door")
            for sock in sockets
        ]

    @property
    def refused(self) -> Counter[str]:
        """How many connections were refused, by kind."""
        return self._refusals.counts

    def count(self, kind: str, where: object, why: object) -> None:
        """Count, and log now and then, one that misbehaved after its hello."""
        self._refusals.add(kind, where, why)

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        both = (*self._sockets, *self._greeting.values())
        return [sock.fileno() for sock in both if sock.fileno() >= 0]

    def close_nowait(self) -> None:
        """Stop listening, and hang up on who is not done with its hello."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in (*self._listening, *self._greeting):
            task.cancel()
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            with contextlib.suppress(OSError, ValueError):
                loop.remove_reader(sock.fileno())
            sock.close()

    async def close(self) -> None:
        """Stop listening, and wait until every greeting has ended."""
        greeting = list(self._greeting)
        self.close_nowait()
        await asyncio.gather(*self._listening, *greeting, return_exceptions=True)

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        count = 0
        while True:
            try:
                sock, where = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, or the dialer was gone again.
                self._logger.warning("could not accept a connection: %s", error)
                await asyncio.sleep(0.05)
                continue
            self._greet(sock, where)
            count += 1
            if count % ACCEPTS_A_TURN == 0:
                await asyncio.sleep(0)

    def _greet(self, sock: socket.socket, where: object) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._try(sock, where), name="multiworld hello")
        self._greeting[task] = sock
        # Not in the task: one that is cancelled before it has begun runs nothing.
        task.add_done_callback(self._over)
        if len(self._greeting) > MAX_GREETING:
            oldest = next(iter(self._greeting))
            self._refusals.add("crowded", where, "too many say hello at once")
            self._over(oldest)
            oldest.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        """Hang up, unless the connection has been taken (and the socket detached)."""
        sock = self._greeting.pop(task, None)
        if sock is not None and (task.cancelled() or not task.done()):
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, ValueError):
                loop.remove_reader(sock.fileno())
                loop.remove_writer(sock.fileno())
            sock.close()

    async def _try(self, sock: socket.socket, where: object) -> None:
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
                hello = await self._welcome(stream, where)
            self._acceptor.take(stream, hello)
            kept = True
        except HandshakeError as error:
            refused.add(error.kind, where, error)
        except TimeoutError:
            refused.add("slow", where, f"no hello within {HELLO_S:g} s")
        except ssl.SSLError as error:
            refused.add("tls", where, error)
        except OSError as error:
            refused.add("malformed", where, error)
        except (frames.FrameError, KeyError, TypeError, ValueError) as error:
            refused.add("malformed", where, repr(error))
        finally:
            if not kept:
                stream.close()

    async def _welcome(self, stream: Stream, where: object) -> Message:
        hello = await read_frame(stream)
        try:
            special = self._acceptor.security_for(hello)
            is_plain = not isinstance(stream, TlsStream)
            if special is None and self._security.tls is not None and is_plain:
                raise HandshakeError("tls", "it came without TLS")
            answer = await _shake(stream, hello, special or self._security)
            why = self._acceptor.refusal(hello)
            if why is not None:
                raise HandshakeError("refused", why, answer=refusal(why))
        except HandshakeError as error:
            self._acceptor.turned_away(hello, error, where)
            if error.answer is not None:
                await write_all(stream, frames.encode(error.answer))
            raise
        await write_all(stream, frames.encode(answer))
        return hello


async def _shake(stream: Stream, hello: Message, security: Security) -> Message:
    steps = accepting(hello, security)
    try:
        message = next(steps)
        while True:
            await write_all(stream, frames.encode(message))
            message = steps.send(await read_frame(stream))
    except StopIteration as end:
        answer: Message = end.value
    return answer


async def _speaks_tls(sock: socket.socket) -> bool:
    """Look at the first byte: TLS begins with 22, a frame of ours with a 0."""
    while True:
        try:
            return sock.recv(1, socket.MSG_PEEK) == b"\x16"
        except (BlockingIOError, InterruptedError):
            await wait_readable(sock)
