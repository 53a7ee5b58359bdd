"""The store on a TCP port. Shell.

Every connection begins with a hello in each direction that names the protocol and its
version. A stranger gets an answer it can read (or none, if it does not speak in frames)
and is hung up on; nobody else notices, but those who wait for the very world that a
member of another version asked for.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from multiworld.rendezvous import frames
from multiworld.rendezvous.service import StoreService

logger = logging.getLogger("multiworld.store")

HELLO_S = 5.0
"""Seconds a connection has to say hello."""

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
"""A session that does not read this much of what it asked for is dropped."""


class StoreServer:
    """A store that listens on one address until ``close``."""

    def __init__(self, service: StoreService | None = None) -> None:
        self._service = service or StoreService()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @classmethod
    async def listen(
        cls, host: str, port: int, *, service: StoreService | None = None
    ) -> StoreServer:
        """Listen on ``host``:``port`` (0: any free port).

        Raises:
            OSError: The address is not ours, or in use.
        """
        store = cls(service)
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
        try:
            async with asyncio.timeout(HELLO_S):
                if not await self._greet(reader, writer):
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
            logger.warning(
                "refused a connection from %s: %r",
                writer.get_extra_info("peername"),
                error,
            )
        finally:
            if session is not None:
                self._service.close_session(session)
            self._writers.discard(writer)
            writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        hello = await frames.read(reader)
        version = int(hello["multiworld"])
        ours = frames.PROTOCOL_VERSION
        writer.write(frames.encode({"multiworld": ours, "ok": version == ours}))
        if version == ours:
            return True
        peer = writer.get_extra_info("peername")
        logger.warning("%s speaks version %d, we speak %d", peer, version, ours)
        detail = f"a member at {peer[0]} speaks version {version}"
        error = {"error": "version", "theirs": version, "detail": detail}
        self._service.refuse(str(hello.get("world", "")), error)
        return False
