"""The store on a TCP port. Shell.

Every connection begins with a handshake. A stranger gets an answer it can read (or
none, if it does not speak in frames) and is hung up on, counted and logged; nobody else
notices, but those who wait for the very world that a member of another version asked
for.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any

from multiworld.rendezvous import frames
from multiworld.rendezvous.handshake import (
    HELLO_BYTES,
    HELLO_S,
    MAX_GREETING,
    HandshakeError,
    accepting,
)
from multiworld.rendezvous.refusals import Refusals
from multiworld.rendezvous.service import StoreService
from multiworld.security import Security

logger = logging.getLogger("multiworld.store")

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
"""A session that does not read this much of what it asked for is dropped."""


class StoreServer:
    """A store that listens on one address until ``close``."""

    def __init__(
        self, service: StoreService | None = None, security: Security | None = None
    ) -> None:
        self._service = service or StoreService()
        self._security = security or Security()
        self._refusals = Refusals(logger, "the store")
        self._greeting: dict[asyncio.Task[None], None] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    async def listen(
        cls,
        host: str,
        port: int,
        *,
        service: StoreService | None = None,
        security: Security | None = None,
    ) -> StoreServer:
        """Listen on ``host``:``port`` (0: any free port).

        Args:
            host: An address of this host.
            port: The port.
            service: What is served; a fresh one by default.
            security: What members must show; nothing by default.

        Raises:
            OSError: The address is not ours, or in use.
        """
        store = cls(service, security)
        store._server = await asyncio.start_server(
            store._accept, host, port, backlog=1024, start_serving=False
        )
        try:
            await store._server.start_serving()
        except BaseException:
            store.close_nowait()
            raise
        return store

    def _accept(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._greeting[task] = None
        if len(self._greeting) > MAX_GREETING:
            next(iter(self._greeting)).cancel()

    @property
    def _sockets(self) -> tuple[Any, ...]:
        return () if self._server is None else self._server.sockets

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._sockets[0].getsockname()[1]
        return port

    @property
    def waiting_count(self) -> int:
        """How many claims wait for other members."""
        return self._service.waiting_count

    @property
    def session_count(self) -> int:
        """How many sessions are open."""
        return self._service.session_count

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were refused, by kind."""
        return dict(self._refusals.counts)

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        accepted = [writer.get_extra_info("socket") for writer in self._writers]
        return [s.fileno() for s in (*self._sockets, *accepted) if s is not None]

    def close_nowait(self) -> None:
        """Stop listening and hang up on everybody."""
        if self._server is not None:
            self._server.close()
        self._service.close()
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Stop listening, hang up, and wait until that is done."""
        self.close_nowait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        session: int | None = None
        self._writers.add(writer)
        where = writer.get_extra_info("peername")
        try:
            if not await self._greeted(reader, writer):
                return

            def deliver(message: dict[str, Any]) -> None:
                writer.write(frames.encode(message))
                if writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES:
                    writer.transport.abort()

            session = self._service.open_session(deliver)
            while True:
                self._service.receive(session, await frames.read(reader))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the other side hung up, or we are closing
        except (frames.FrameError, KeyError, TypeError, ValueError) as error:
            self._refusals.add("malformed", where, repr(error))
        finally:
            if session is not None:
                self._service.close_session(session)
            self._writers.discard(writer)
            writer.close()

    async def _greeted(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Shake hands; False if the other side is not to be served."""
        where, refused = writer.get_extra_info("peername"), self._refusals
        task = asyncio.current_task()
        assert task is not None
        try:
            async with asyncio.timeout(HELLO_S):
                await self._greet(reader, writer)
            return True
        except TimeoutError:
            refused.add("slow", where, f"no hello within {HELLO_S:g} s")
        except asyncio.CancelledError:
            if self._server is not None and self._server.is_serving():
                refused.add("crowded", where, "too many say hello at once")
            raise
        except HandshakeError as error:
            refused.add(error.kind, where, error)
            if error.answer is not None:
                writer.write(frames.encode(error.answer))
        except ssl.SSLError as error:
            refused.add("tls", where, error)
        except (frames.FrameError, KeyError, TypeError, ValueError) as error:
            refused.add("malformed", where, repr(error))
        except (OSError, asyncio.IncompleteReadError):
            refused.add("malformed", where, "hung up during its hello")
        finally:
            self._greeting.pop(task, None)
        return False

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if self._security.tls is not None:
            await writer.start_tls(self._security.tls.context(is_server=True))
        hello = await frames.read(reader, HELLO_BYTES)
        try:
            steps = accepting(hello, self._security)
            try:
                writer.write(frames.encode(next(steps)))
                while True:
                    answer = steps.send(await frames.read(reader, HELLO_BYTES))
                    writer.write(frames.encode(answer))
            except StopIteration as end:
                writer.write(frames.encode(end.value))
        except HandshakeError as error:
            if error.kind == "version":
                self._warn_waiting(hello, error, writer)
            raise

    def _warn_waiting(
        self, hello: dict[str, Any], error: HandshakeError, writer: asyncio.StreamWriter
    ) -> None:
        """Tell those who wait for the world that this member cannot come in.

        Only where nobody has to show a secret: a stranger must not disturb them.
        """
        if self._security.secret or self._security.tls is not None:
            return
        peer = writer.get_extra_info("peername")
        detail = f"a member at {peer[0]} speaks version {error.theirs}"
        body = {"error": "version", "theirs": error.theirs, "detail": detail}
        self._service.refuse(str(hello.get("world", "")), body)
