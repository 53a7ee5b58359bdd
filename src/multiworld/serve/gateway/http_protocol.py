"""The HTTP of uvicorn, with bounds on what a connection may hold without asking."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

HEAD_BYTES = 64 * 1024
"""Most bytes of a request's line and headers; what Apache and nginx take is less."""

ANSWER = (
    "HTTP/1.1 {0}\r\ncontent-type: application/json\r\ncontent-length: {1}\r\n"
    "connection: close\r\n\r\n{2}"
)


def bounded(head_s: float, max_connections: int) -> type[asyncio.Protocol]:
    """Return a protocol for ``uvicorn.Config(http=...)``.

    Args:
        head_s: Seconds from a connection's begin, or a request's first byte, until its
            headers are complete; then the answer is 408, and the connection is closed.
        most: Connections at a time; one more is answered with 503 and closed.
    """

    class Bounded(HttpToolsProtocol):
        """One connection."""

        def __init__(
            self, config: Config, server_state: ServerState, *args: Any, **kwargs: Any
        ) -> None:
            super().__init__(config, server_state, *args, **kwargs)
            self._timer: asyncio.TimerHandle | None = None
            self._head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                text = (
                    f"this gateway has {max_connections} connections already; use fewer"
                )
                self._refuse("503 Service Unavailable", text)
            else:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head_bytes = 0
            if self._timer is None:
                self._start_timer()

        def on_headers_complete(self) -> None:
            self._stop_timer()
            if not self.transport.is_closing():
                super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self._timer is not None:  # the head is not complete
                self._head_bytes += len(data)
                if self._head_bytes > HEAD_BYTES:
                    text = f"the headers are longer than {HEAD_BYTES} bytes"
                    self._refuse("431 Request Header Fields Too Large", text)

        def _start_timer(self) -> None:
            text = f"the headers took longer than {head_s:g} s"
            self._timer = self.loop.call_later(
                head_s, self._refuse, "408 Request Timeout", text
            )

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, status: str, text: str) -> None:
            self._stop_timer()
            body = f'{{"error": "{text}"}}'
            answer = ANSWER.format(status, len(body), body)
            self.transport.write(answer.encode())
            self.transport.close()

    return Bounded
