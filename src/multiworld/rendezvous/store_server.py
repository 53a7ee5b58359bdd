"""Server of a store on a TCP port."""

from __future__ import annotations

import logging
import socket

from multiworld.net.framed_connection import FramedConnection
from multiworld.net.frames import FrameError
from multiworld.net.handshake import HandshakeError
from multiworld.net.handshake_messages import Hello
from multiworld.net.listener import Listener
from multiworld.net.security import Security
from multiworld.net.streams import Stream
from multiworld.net.tcp import resolve
from multiworld.rendezvous.store_messages import (
    StoreHello,
    StoreMessage,
    StoreRequest,
    VersionDiffers,
    requests,
)
from multiworld.rendezvous.store_service import StoreService

logger = logging.getLogger("multiworld.store")

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
"""Bytes queued for one session, at most. A session that lets more accumulate is closed.
"""

BACKLOG = 1024
"""Connections in the listening socket's queue, at most."""


class StoreServer:
    """A store that listens on one address until it is closed.

    Attributes:
        port: The TCP port that it listens on.
    """

    hellos = StoreHello

    def __init__(
        self,
        sock: socket.socket,
        service: StoreService | None,
        security: Security | None,
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self._service = service or StoreService()
        self._security = security or Security()
        self._sessions: dict[int, FramedConnection[StoreRequest]] = {}
        self._listener = Listener([sock], self, self._security, logger, "the store")

    @classmethod
    async def listen(
        cls,
        host: str,
        port: int,
        *,
        service: StoreService | None = None,
        security: Security | None = None,
    ) -> StoreServer:
        """Return a store that listens on ``host``:``port``.

        Args:
            host: An address of this host.
            port: TCP port; 0 for any free one.
            service: The service behind it; a new one by default.
            security: Secret and TLS that members must use; none by default.

        Raises:
            OSError: The address does not belong to this host, or is in use.

        Cancellation:
            Safe; nothing stays open.
        """
        family, where = await resolve(host, port)
        sock = socket.create_server(where[:2], family=family, backlog=BACKLOG)
        sock.setblocking(False)
        return cls(sock, service, security)

    @property
    def waiting_count(self) -> int:
        """Number of claims that wait for other members."""
        return self._service.waiting_count

    @property
    def session_count(self) -> int:
        """Number of open sessions."""
        return self._service.session_count

    @property
    def refused(self) -> dict[str, int]:
        """Number of refused connections, by kind."""
        return dict(self._listener.refused)

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        sessions = [framed.fileno() for framed in self._sessions.values()]
        return [fd for fd in (*self._listener.filenos(), *sessions) if fd >= 0]

    def close_nowait(self) -> None:
        """Stop listening and close every session."""
        self._listener.close_nowait()
        self._service.close()
        for framed in self._sessions.values():
            framed.close()
        self._sessions.clear()

    async def close(self) -> None:
        """Stop listening, close every session, and wait for handshakes to end.

        Cancellation:
            The store is closed all the same; only the wait ends.
        """
        self.close_nowait()
        await self._listener.close()

    # Acceptor.

    def security_for(self, hello: Hello) -> Security | None:
        """Return None: every connection must meet the store's own security."""
        return None

    def refusal(self, hello: Hello) -> str | None:
        """Return None: every authenticated connection is welcome."""
        return None

    def take(self, stream: Stream, hello: Hello) -> None:
        """Open a session on a new connection."""
        key = 0

        def deliver(message: StoreMessage) -> None:
            try:
                framed.send(message)
                is_open = framed.backlog <= MAX_BACKLOG_BYTES
            except FrameError as error:
                logger.error("cannot answer a member: %s", error)
                is_open = False
            if not is_open:
                framed.close()
                self._ended(key)

        def received(message: StoreRequest) -> None:
            self._service.receive(key, message)

        def ended(evidence: str, is_broken: bool) -> None:
            if is_broken:
                self._listener.count("malformed", "a member", evidence)
            self._ended(key)

        framed = FramedConnection(stream, requests, received, ended)
        key = self._service.open_session(deliver)
        self._sessions[key] = framed

    def turned_away(self, hello: Hello, error: HandshakeError, where: object) -> None:
        """Tell members that wait for a world that one of another version cannot join.

        With a secret or TLS, tell them nothing: an unauthenticated process must not be
        able to disturb a world.

        Args:
            hello: The connection's first message.
            error: The reason for the refusal.
            where: The remote socket address.
        """
        if error.kind != "version" or self._security.secret or self._security.tls:
            return
        place = where[0] if isinstance(where, tuple) else "this host"
        detail = f"a member at {place} speaks version {error.theirs}"
        if isinstance(hello, StoreHello):
            self._service.refuse(hello.world, VersionDiffers(error.theirs, detail))

    def _ended(self, key: int) -> None:
        self._sessions.pop(key, None)
        self._service.close_session(key)
