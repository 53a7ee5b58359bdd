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
from multiworld.net.tcp import keep_alive, resolve
from multiworld.rendezvous import store_messages as messages
from multiworld.rendezvous.store_service import StoreService

logger = logging.getLogger("multiworld.store")

# Maximum number of bytes queued for a session. With more, the session is closed.
MAX_BACKLOG_BYTES = 64 * 1024 * 1024
BACKLOG = 1024  # maximum number of connections in the listening socket's queue


class StoreServer:
    hellos = messages.StoreHello

    def __init__(
        self,
        sock: socket.socket,
        service: StoreService | None,
        security: Security | None,
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self._service = service or StoreService()
        self._security = security or Security()
        self._sessions: dict[int, FramedConnection[messages.StoreRequest]] = {}
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
        """Return a store that listens on ``host``:``port``; port 0: any free one."""
        family, where = await resolve(host, port)
        # "::" stands for every address, IPv4 addresses included.
        both = host == "::" and socket.has_dualstack_ipv6()
        sock = socket.create_server(
            where[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both
        )
        sock.setblocking(False)
        return cls(sock, service, security)

    @property
    def refused(self) -> dict[str, int]:
        return dict(self._listener.refused)

    def close_nowait(self) -> None:
        self._listener.close_nowait()
        self._service.close()
        for framed in self._sessions.values():
            framed.close()
        self._sessions.clear()

    async def close(self) -> None:
        self.close_nowait()
        await self._listener.close()

    # Acceptor.

    def security_for(self, hello: Hello) -> Security | None:
        return None

    def refusal(self, hello: Hello) -> str | None:
        return None

    def take(self, stream: Stream, hello: Hello) -> None:
        # Send probes, so that a host that vanished does not stay a member for ever.
        keep_alive(stream)
        key = 0

        def deliver(message: messages.StoreMessage) -> None:
            try:
                framed.send(message)
                is_open = framed.backlog <= MAX_BACKLOG_BYTES
            except FrameError as error:
                logger.error("the store cannot answer a member: %s", error)
                is_open = False
            if not is_open:
                framed.close()
                self._ended(key)

        def received(message: messages.StoreRequest) -> None:
            self._service.receive(key, message)

        def ended(evidence: str, is_broken: bool) -> None:
            if is_broken:
                self._listener.count("malformed", "a member", evidence)
            self._ended(key)

        framed = FramedConnection(stream, messages.requests, received, ended)
        key = self._service.open_session(deliver)
        self._sessions[key] = framed

    def turned_away(self, hello: Hello, error: HandshakeError, where: object) -> None:
        """Fail the joins that wait for a member of another protocol version."""
        # With a secret or TLS, ignore the dialer: an untrusted peer must not disturb a
        # world.
        if error.kind != "version" or self._security.secret or self._security.tls:
            return
        place = where[0] if isinstance(where, tuple) else "this host"
        detail = f"a member at {place} speaks version {error.theirs}"
        if isinstance(hello, messages.StoreHello):
            self._service.refuse(
                hello.world, messages.VersionDiffers(error.theirs, detail)
            )

    def _ended(self, key: int) -> None:
        self._sessions.pop(key, None)
        self._service.close_session(key)
