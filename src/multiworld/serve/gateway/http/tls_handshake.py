"""TLS handshakes that have a time limit and count as connections.

asyncio's own server reports a connection only after its TLS handshake, which may take a
minute. Until then, a silent client could hold a file descriptor that no limit counts.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from multiworld.errors import ServeError
from multiworld.net.file_version import version_of
from multiworld.serve.gateway.http.http_protocol import ConnectionLimits
from multiworld.serve.spec.schema import GatewaySpec

logger = logging.getLogger("multiworld.serve")


class Certificate:
    """A certificate whose files may be replaced while it is in use."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = certificate, key
        self._version = self._newest()
        self._context = self._loaded()

    def context(self) -> ssl.SSLContext:
        """Return the context for the next connection."""
        newest = self._newest()
        if newest != self._version:
            self._version = newest
            try:
                self._context = self._loaded()
            # ``ssl.SSLError`` is an OSError; it occurs while only one file is replaced.
            except OSError as error:
                logger.warning(
                    "cannot load the new certificate, so the old one stays in use: %s",
                    error,
                )
        return self._context

    def _newest(self) -> tuple[tuple[int, int], ...]:
        return tuple(map(version_of, self._files))

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._files)
        return context


def check_certificate(spec: GatewaySpec) -> None:
    """Raise ServeError once, before gateways start, if the certificate is unusable."""
    if spec.tls_certificate is None or spec.tls_key is None:
        return
    try:
        Certificate(spec.tls_certificate, spec.tls_key)
    except OSError as error:  # also an ``ssl.SSLError``
        raise ServeError(
            f"gateway.tls_certificate {spec.tls_certificate!r} with gateway.tls_key "
            f"{spec.tls_key!r} cannot be used: {error}; give PEM files, with paths "
            "relative to the folder in which the service is started"
        ) from error


class Handshake(asyncio.Protocol):
    """A connection in its TLS handshake; ``inner`` is its protocol afterwards.

    The connection is closed if its handshake takes longer than ``limits.head_s``, or if
    there are more than ``limits.max_connections``, including handshakes (``running``).
    """

    def __init__(
        self,
        inner: Callable[..., asyncio.Protocol],
        certificate: Certificate,
        limits: ConnectionLimits,
        running: set[asyncio.Task[None]],
        config: Config,
        server_state: ServerState,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._inner = inner(config, server_state, *args, **kwargs)
        self._certificate, self._limits, self._running = certificate, limits, running
        self._open = server_state.connections
        # Whether ``inner`` has the connection; whether the connection is lost.
        self._is_made = self._is_lost = False
        self._early: list[bytes] = []  # data that arrived with the end of the handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self._running) + len(self._open) > self._limits.max_connections:
            transport.abort()
            return
        transport.pause_reading()
        task = asyncio.ensure_future(self._shake_hands(transport))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _shake_hands(self, raw: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(
                raw,
                self,
                self._certificate.context(),
                server_side=True,
                ssl_handshake_timeout=self._limits.head_s,
            )
        # The client does not speak TLS (``ssl.SSLError``, an OSError), or is too slow.
        except OSError:
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
        if self._is_made:  # else ``inner`` never had the connection
            self._inner.connection_lost(exc)
        self._is_lost = True


def with_tls(
    inner: Callable[..., asyncio.Protocol],
    certificate: Certificate,
    limits: ConnectionLimits,
) -> type[asyncio.Protocol]:
    """Return a protocol factory for ``uvicorn.Config(http=...)`` that handles TLS."""
    running = set[asyncio.Task[None]]()
    made: Any = partial(Handshake, inner, certificate, limits, running)
    return cast("type[asyncio.Protocol]", made)
