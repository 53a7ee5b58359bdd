"""TLS handshakes that count as connections, and are bounded in time.

asyncio's own server tells of a connection after its handshake, for which it allows a
minute; so whoever sends nothing holds a descriptor that no limit knows.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState


def context_of(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def with_tls(
    inner: type[asyncio.Protocol],
    context: ssl.SSLContext,
    head_s: float,
    max_connections: int,
) -> type[asyncio.Protocol]:
    """Return a protocol class for ``uvicorn.Config(http=...)`` without its TLS.

    A connection becomes one of ``inner`` once its handshake is complete. One whose
    handshake takes longer than ``head_s`` is closed, and so is one beyond
    ``max_connections``, which includes those in their handshakes.
    """
    running: set[asyncio.Task[None]] = set()

    class Handshake(asyncio.Protocol):
        def __init__(
            self, config: Config, server_state: ServerState, *args: Any, **kwargs: Any
        ) -> None:
            made: Any = inner
            self._inner: asyncio.Protocol = made(config, server_state, *args, **kwargs)
            self._open = server_state.connections
            self._is_made = self._is_lost = False  # the connection of ``inner``
            self._early: list[bytes] = []  # sent with the end of the handshake

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            if len(running) + len(self._open) > max_connections:
                transport.abort()
                return
            transport.pause_reading()
            task = asyncio.ensure_future(self._shake_hands(transport))
            running.add(task)
            task.add_done_callback(running.discard)

        async def _shake_hands(self, raw: asyncio.Transport) -> None:
            loop = asyncio.get_running_loop()
            try:
                transport = await loop.start_tls(
                    raw,
                    self,
                    context,
                    server_side=True,
                    ssl_handshake_timeout=head_s,
                )
            except OSError:  # also of TLS; it was not a client of ours, or a slow one
                raw.abort()
                return
            if transport is None or self._is_lost:
                raw.abort()
                return
            self._is_made = True
            transport.set_protocol(self._inner)
            self._inner.connection_made(transport)
            for data in self._early:
                self._inner.data_received(data)
            self._early.clear()

        def data_received(self, data: bytes) -> None:
            self._early.append(data)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._is_made:  # lost with the end of the handshake
                self._inner.connection_lost(exc)
            self._is_lost = True

    return Handshake
