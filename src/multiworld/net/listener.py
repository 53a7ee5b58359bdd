"""The listener: accepts connections, authenticates and refuses them. Connections that
complete the handshake within ``HELLO_S`` are passed on. Other connections are closed
and counted, and a sample of them is logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Generator
from typing import Any, Protocol, TypeVar

import msgspec

from multiworld.net import frames, streams
from multiworld.net.forks import closed_in_forks
from multiworld.net.handshake import (
    HELLO_BYTES,
    HELLO_S,
    MAX_GREETING,
    HandshakeError,
    accepting,
    decode_hello,
    refusal,
)
from multiworld.net.handshake_messages import Hello
from multiworld.net.rare_log import RareLog
from multiworld.net.security import Security
from multiworld.net.tcp import tune

ACCEPTS_A_TURN = 16  # connections accepted before the event loop's other tasks run
# Seconds between log lines of one kind, so that a scanner cannot fill the log.
LOG_EVERY_S = 10.0

R = TypeVar("R")


class Acceptor(Protocol):
    """The owner of accepted connections."""

    hellos: Any  # a subclass of ``Hello``, or a union of several

    def security_for(self, hello: Hello) -> Security | None:
        """Return a connection's security; None: the listener's security applies.

        A connection whose security is returned here needs no TLS. Raise
        ``HandshakeError`` to refuse a connection before it proves anything.
        """

    def refusal(self, hello: Hello) -> str | None:
        """Return why to refuse a connection with this hello, or None."""

    def take(self, stream: streams.Stream, hello: Hello) -> None:
        """Take ownership of the connection."""

    def turned_away(self, hello: Hello, error: HandshakeError, where: object) -> None:
        """React to a refused connection whose hello could be read."""


async def read_frame(stream: streams.Stream, limit: int = HELLO_BYTES) -> bytes:
    """Return a frame's body. If cancelled, a part may be lost: close the stream."""
    length = frames.decode_length(await streams.read_exactly(stream, 4), limit)
    return await streams.read_exactly(stream, length)


async def shake_hands(stream: streams.Stream, steps: Generator[bytes, bytes, R]) -> R:
    """Follow one side of the handshake; return its outcome."""
    try:
        frame = next(steps)
        while True:
            await streams.write_all(stream, frame)
            frame = steps.send(await read_frame(stream))
    except StopIteration as end:
        outcome: R = end.value
        return outcome


class Listener:
    """Listens on one or more sockets, which it owns, until it is closed."""

    def __init__(
        self,
        sockets: list[socket.socket],
        acceptor: Acceptor,
        security: Security,
        logger: logging.Logger,
        what: str,
    ) -> None:
        self._sockets = [closed_in_forks(sock) for sock in sockets]
        self._acceptor, self._security = acceptor, security
        self._logger, self._what = logger, what
        self._hellos = msgspec.json.Decoder(acceptor.hellos)
        # Number of refused connections by kind: "version", "secret", "tls",
        # "malformed", "slow", "crowded" or "refused".
        self.refused: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}
        self._rare_log = RareLog(logger)
        self._greeting: dict[asyncio.Task[None], socket.socket] = {}
        self._is_closed = False
        loop = asyncio.get_running_loop()
        self._listening = [
            loop.create_task(self._listen(sock), name="multiworld listener")
            for sock in sockets
        ]

    def count(self, kind: str, where: object, why: object) -> None:
        """Count a refusal or misbehaviour, and log it unless that was done recently."""
        self.refused[kind] += 1
        now, count = time.monotonic(), self.refused[kind]
        at, logged = self._logged.get(kind, (now - LOG_EVERY_S, 0))
        if now - at < LOG_EVERY_S:
            return
        self._logged[kind] = now, count
        more = count - logged - 1
        self._logger.warning(
            "%s refused a connection from %s: %s: %s%s",
            self._what,
            where or "this host",
            kind,
            why,
            f" (and {more} more like it)" if more else "",
        )

    def close_nowait(self) -> None:
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
        """Stop listening and wait for handshakes; cancelling stops only the wait."""
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
                # This process has too many open files, or the dialer has hung up.
                self._rare_log.error(
                    "this process could not accept a connection", error
                )
                await asyncio.sleep(0.05)
                continue
            self._greet(closed_in_forks(sock), where)
            count += 1
            if count % ACCEPTS_A_TURN == 0:
                await asyncio.sleep(0)

    def _greet(self, sock: socket.socket, where: object) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._try(sock, where), name="multiworld hello")
        self._greeting[task] = sock
        # A callback instead of ``finally`` in the task, because a task that is
        # cancelled before its first step runs no code.
        task.add_done_callback(self._over)
        if len(self._greeting) > MAX_GREETING:
            oldest = next(iter(self._greeting))
            self.count("crowded", where, "too many handshakes at once")
            self._over(oldest)
            oldest.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        """Close the socket, unless the acceptor has taken the connection."""
        sock = self._greeting.pop(task, None)
        if sock is not None and (task.cancelled() or not task.done()):
            loop = asyncio.get_running_loop()
            with contextlib.suppress(OSError, ValueError):
                loop.remove_reader(sock.fileno())
                loop.remove_writer(sock.fileno())
            sock.close()

    async def _try(self, sock: socket.socket, where: object) -> None:
        """Do the handshake; pass the connection on, or close it."""
        stream: streams.Stream = sock
        kept = False
        try:
            tune(sock)
            async with asyncio.timeout(HELLO_S):
                if self._security.tls is not None and await _speaks_tls(sock):
                    context = self._security.tls.context(is_server=True)
                    stream = await streams.start_tls(sock, context, is_server=True)
                hello = await self._welcome(stream, where)
            self._acceptor.take(stream, hello)
            kept = True
        except HandshakeError as error:
            self.count(error.kind, where, error)
        except TimeoutError:
            self.count("slow", where, f"no complete handshake within {HELLO_S:g} s")
        except ssl.SSLError as error:
            self.count("tls", where, error)
        except OSError as error:
            self.count("malformed", where, error)
        except (frames.FrameError, ValueError) as error:
            self.count("malformed", where, repr(error))
        finally:
            if not kept:
                stream.close()

    async def _welcome(self, stream: streams.Stream, where: object) -> Hello:
        hello: Hello | None = None
        try:
            hello = decode_hello(await read_frame(stream), self._hellos)
            special = self._acceptor.security_for(hello)
            is_plain = not isinstance(stream, streams.TlsStream)
            if special is None and self._security.tls is not None and is_plain:
                raise HandshakeError("tls", "the peer does not use TLS")
            answer = await shake_hands(
                stream, accepting(hello, special or self._security)
            )
            why = self._acceptor.refusal(hello)
            if why is not None:
                raise HandshakeError("refused", why, answer=refusal(why))
        except HandshakeError as error:
            if hello is not None:
                self._acceptor.turned_away(hello, error, where)
            if error.answer is not None:
                await streams.write_all(stream, frames.encode(error.answer))
            raise
        await streams.write_all(stream, frames.encode(answer))
        return hello


async def _speaks_tls(sock: socket.socket) -> bool:
    """Return whether TLS follows, which starts with byte 22; frames start with 0."""
    while True:
        try:
            return sock.recv(1, socket.MSG_PEEK) == b"\x16"
        except (BlockingIOError, InterruptedError):
            await streams.wait_readable(sock)
