"""uvicorn's HTTP protocol with limits on headers, time and connections.

``INTERNALS`` and ``CYCLE_INTERNALS`` list the private names of uvicorn used here. A
test fails if uvicorn no longer has one of them, or if this module uses others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from multiworld.serve.deadlines import STALL_S
from multiworld.serve.gateway.http.http_request import (
    CONNECTION,
    IS_COMPLETE,
    RECORDER,
    Connection,
)
from multiworld.serve.gateway.http.recorded_transport import RecordedTransport
from multiworld.serve.gateway.http.recorder import Unrecorded
from multiworld.serve.keeper.connection_record import ConnectionRecord

# Names of uvicorn 0.54's ``HttpToolsProtocol`` that this module uses, besides the names
# of asyncio's ``Protocol``: callbacks of the parser (which this module extends),
# methods, and state.
INTERNALS = {
    *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body"),
    *("on_message_complete", "on_response_complete", "send_400_response"),
    "_unset_keepalive_if_required",
    *("connections", "cycle", "flow", "headers", "loop", "parser", "pipeline", "scope"),
    *("timeout_keep_alive", "timeout_keep_alive_handler", "timeout_keep_alive_task"),
    *("transport", "url"),
}

# Names of uvicorn's ``RequestResponseCycle`` that this module uses.
CYCLE_INTERNALS = {
    *("body", "chunked_encoding", "disconnected", "expected_content_length"),
    *("message_event", "more_body", "response_complete", "send", "transport"),
    "waiting_for_100_continue",
}

# Maximum bytes of a request line and its headers; nginx allows less.
HEAD_BYTES = 64 * 1024
HEADER_BYTES = 4  # bytes of a header line besides name and value: colon, space, CRLF

TOO_LONG = (
    "431 Request Header Fields Too Large",
    f"headers are longer than {HEAD_BYTES} bytes; shorten them",
)

# Headers that a request may have only once, because two could name two tenants.
CREDENTIALS = (b"authorization", b"x-api-key")

# Reply to a client that waits before it sends its body. ``HeadBuffer`` does not hold
# this reply back.
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

PIPELINED = 64  # maximum requests without a complete answer on a connection
PIPELINED_BYTES = 64 * 1024  # total bytes of waiting bodies above which reading pauses

# Headers that ask for another protocol; the gateway removes them (RFC 9110, 7.8).
UPGRADE = (b"upgrade", b"http2-settings")

# Seconds for which the rest of a refused request is read and discarded. If bytes were
# left unread at the close, the client might see a reset connection, not the refusal.
LINGER_S = 2.0
# Maximum connections that linger; they do not count towards ``max_connections``.
LINGERING = 64

# Format of a refusal; its arguments are the status, the body's length, and the body.
ANSWER = (
    "HTTP/1.1 {0}\r\ncontent-type: application/json\r\ncontent-length: {1}\r\n"
    "connection: close\r\n\r\n{2}"
)


async def without_chunks(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any
) -> None:
    """Send an ASGI message to an HTTP/1.0 client, which cannot decode chunks.

    An answer without a length ends when the connection closes (RFC 9112, 6.3).
    """
    if message["type"] == "http.response.start":
        names = {name.lower() for name, _ in message.get("headers", ())}
        if b"content-length" not in names:
            cycle.chunked_encoding = False
    elif cycle.chunked_encoding is False and not cycle.expected_content_length:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


class HeadBuffer:
    """A transport that sends the head of a response in one packet with its body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self.is_discarding = False  # further output is discarded
        self.has_head = False  # another gateway has sent the next answer's head
        self.has_interim = False  # another gateway has sent that answer's 100 Continue

    def write(self, data: bytes) -> None:
        """Send ``data``, or hold it back if it is the head of a response."""
        if self.is_discarding:
            return
        is_head = data.startswith(b"HTTP/") and data.endswith(b"\r\n\r\n")
        if data == CONTINUE:
            _write_interim(self._transport, data)
        elif is_head:
            self.flush()
            self._head = b"" if self.has_head else data
            self.has_head = False
        else:
            self._transport.write(self._head + data if self._head else data)
            self._head = b""

    def flush(self) -> None:
        if self._head and not self.is_discarding:
            self._transport.write(self._head)
        self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self.is_discarding or self._transport.is_closing()


def _write_interim(transport: Any, data: bytes) -> None:
    """Write an interim response, which is recorded separately from the answer."""
    getattr(transport, "write_interim", transport.write)(data)


def head_without_upgrade(
    method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]
) -> bytes:
    """Return a request's head without the headers that ask for another protocol."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            kept = [w for w in value.split(b",") if w.strip().lower() not in UPGRADE]
            value = b",".join(kept)
        if name not in UPGRADE:
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server's connections."""

    # Maximum seconds until a request's headers are complete (else 408), from the start
    # of the connection or, for later requests, from their first byte.
    head_s: float
    max_connections: int  # maximum number of open connections; further ones get 503


class BoundedProtocol(HttpToolsProtocol):
    """One connection; ``lingering``: refused connections that are not yet closed.

    If ``recorder`` has another gateway's record, this gateway takes the connection
    over: it sends the recorded output, and then parses the recorded requests again, but
    answers only those without an answer. An answer that had begun continues after its
    recorded part.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        lingering: set[BoundedProtocol],
        config: Config,
        server_state: ServerState,
        *args: Any,
        recorder: Unrecorded | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, server_state, *args, **kwargs)
        self._recorder = Unrecorded() if recorder is None else recorder
        self._is_in_message = False
        # Number of recorded requests that are answered, but not yet parsed again.
        self._answered_before = 0
        # True while ``_feed`` parses a head again, without its upgrade.
        self._is_read_again = False
        # True: this request is not served, because another gateway answered it.
        self._is_answered_before = False
        self._has_request = False  # a request to be served has begun; see ``is_single``
        self._limits, self._lingering = limits, lingering
        # Timers by name: head, late, linger, stall.
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._has_progress = False
        self._unused_bytes = 0
        self._head_bytes = 0
        self._is_after_head = False
        self._credentials: set[bytes] = set()
        self._connection = Connection()
        self._cycles: list[RequestResponseCycle] = []  # incomplete answers
        self._refusal = b""  # sent after the answers of ``_cycles``

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport = self._recorder.begin(transport, self)
        super().connection_made(transport)
        # With this limit, any unsent byte pauses writing, which starts the stall timer.
        # A TLS transport gets no such limit: its writing would always be paused, and it
        # has its own time limit for closing.
        if transport.get_extra_info("sslcontext") is None:
            transport.set_write_buffer_limits(high=0)
        self._heads = HeadBuffer(transport)
        most = self._limits.max_connections
        if (record := self._recorder.taken_over) is not None:
            self._take_over(record)  # the limit of connections does not apply
        elif len(self.connections) - len(self._lingering) > most:
            text = f"gateway has reached its limit of {most} connections; retry later"
            self._refuse("503 Service Unavailable", text)
        else:
            self._start_timer()

    def _take_over(self, record: ConnectionRecord) -> None:
        """Continue a connection at the point where another gateway's record ends."""
        transport = cast("RecordedTransport", self.transport)
        if record.output:
            transport.write_unrecorded(bytes(record.output))
        if record.is_closing:
            self.transport.close()
            return
        self._answered_before = record.answered
        self._heads.has_head = record.has_begun
        self._heads.has_interim = record.has_interim
        if record.input:
            self._feed(bytes(record.input))
        if self._is_in_message and self._is_answered_before:
            self._limit_rest()
        if not self._is_in_message and not self._cycles:
            # The connection is idle, as after an answer.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
            self._record_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._stop_timer(name)
        self._lingering.discard(self)
        self._recorder.closed()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn notifies only the latest cycle
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._connection.lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_timer("stall")
        self._start_stall_timer()

    def resume_writing(self) -> None:
        self._stop_timer("stall")
        super().resume_writing()

    def on_message_begin(self) -> None:
        self._is_in_message = True
        if not self._is_read_again:
            self._is_answered_before = self._answered_before > 0
            self._answered_before -= self._is_answered_before
            if self._recorder.is_single and not self._is_answered_before:
                # Ignore requests after the first, which their client still waits for.
                self._is_answered_before = self._has_request
                self._has_request = True
        if self._recorder.is_single:
            self._is_in_message = not self._is_answered_before
        self._is_read_again = False
        super().on_message_begin()
        self._scope()[CONNECTION] = self._connection
        self._scope()[RECORDER] = self._recorder
        self._head_bytes = 0
        self._is_after_head = False
        self._credentials.clear()
        if self._is_in_message and "head" not in self._timers:
            self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + HEADER_BYTES)
        if self._is_after_head:  # a trailer, not a header (RFC 9110, 6.5.1)
            return
        if (key := name.lower()) in CREDENTIALS:
            if key in self._credentials and not self.transport.is_closing():
                text = f"more than one {key.decode()} header; send one"
                self._refuse("400 Bad Request", text)
            self._credentials.add(key)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_progress = self._is_after_head = True
        if self.parser.should_upgrade():
            return  # ``_feed`` parses the headers again, without the upgrade
        self._stop_timer("head")
        if self._is_answered_before:
            return
        if len(self._cycles) >= PIPELINED:
            self.transport.close()
        if not self._refusal and not self.transport.is_closing():
            if wrong := self._wrong_head():
                self._refuse("400 Bad Request", wrong)
                return
            super().on_headers_complete()
            if self.cycle is not None:
                if self.parser.get_http_version() == "1.0":
                    self.cycle.send = partial(  # type: ignore[method-assign]
                        without_chunks, self.cycle, self.cycle.send
                    )
                is_first = not self._cycles  # it may continue a recorded answer
                if is_first and (self._heads.has_head or self._heads.has_interim):
                    self.cycle.waiting_for_100_continue = False
                self._heads.has_interim = False
                self._cycles.append(self.cycle)
                self.cycle.transport = self._heads  # type: ignore[assignment]
                self._read_on()

    def _wrong_head(self) -> str:
        """Return why a request's version or Host header is invalid; empty if valid."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):  # a line without a version is HTTP/0.9
            return f"HTTP/{version} is not served; use HTTP/1.1"
        hosts = sum(name == b"host" for name, _ in self.headers)
        if version == "1.1" and hosts != 1:  # RFC 9112, 3.2
            return f"the request has {hosts} Host headers; send one"
        return ""

    def on_response_complete(self) -> None:
        # Send a head that no body follows, as in the answer to a HEAD request.
        self._heads.flush()
        # Drop complete cycles, because they keep headers and unread bodies in memory.
        self._cycles = [c for c in self._cycles if not c.response_complete]
        if not self._record_idle():
            self._recorder.answered()
        if self._refusal and not self._cycles:
            self._send_refusal()
            return  # later requests on this connection are not served
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self._refusal or self.transport.is_closing():
            self._recorder.skipped(len(data))
            return
        if self._has_late_body:
            self._recorder.skipped(len(data))
        else:
            self._recorder.received(data)
        self._has_progress = False
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._refusal:
            return
        self._count_unused(len(data))
        self._limit_late_body()
        self._limit_idle()
        self._record_idle()

    def _record_idle(self) -> bool:
        """Record the connection as idle if no request is open; return whether it is."""
        is_idle = not (self._is_in_message or self._cycles or self._refusal)
        if is_idle:
            self._recorder.idle()
        return is_idle

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while (upgraded := self._fed(rest)) is not None:
                if self._refusal or self.transport.is_closing():
                    return
                # The parser stops, because further bytes may use the other protocol. A
                # server that does not support it must continue with HTTP (RFC 9110,
                # 7.8).
                rest = rest[upgraded:]
                method = self.parser.get_method()
                version = self.parser.get_http_version()
                if method == b"CONNECT":
                    self._refuse("405 Method Not Allowed", "CONNECT is not served")
                    return
                head = head_without_upgrade(method, self.url, version, self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self._is_read_again = True
                self.parser.feed_data(head)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _fed(self, data: memoryview) -> int | None:
        """Parse ``data``; return how much of it precedes an upgrade, None if none."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            count: int = upgrade.args[0]
            return count
        return None

    def on_body(self, body: bytes) -> None:
        self._has_progress = True
        if not (self._refusal or self._is_answered_before):
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refusal or self.parser.should_upgrade():
            return
        self._is_in_message = False
        self._stop_timer("late")
        if self._is_answered_before:
            return
        self._has_progress = True
        self._scope()[IS_COMPLETE] = True
        super().on_message_complete()
        if self.cycle is not None:  # uvicorn skips this if the answer is complete
            self.cycle.more_body = False
        self._read_on()

    def _read_on(self) -> None:
        """Resume reading between messages, to notice when the client disconnects."""
        waiting = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if waiting <= PIPELINED_BYTES:
            self.flow.resume_reading()

    def _scope(self) -> dict[str, Any]:
        return self.scope  # type: ignore[return-value]

    def _count_head(self, size: int) -> None:
        """Limit the size of one request's headers, even if they arrive all at once."""
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(*TOO_LONG)

    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def _close_stalled(self, unsent: int) -> None:
        """Close the connection if the client has read nothing for ``STALL_S``."""
        if self._unsent_bytes() >= unsent:
            self.transport.abort()
            return
        self._start_stall_timer()

    def _start_stall_timer(self) -> None:
        self._timers["stall"] = self.loop.call_later(
            STALL_S, self._close_stalled, self._unsent_bytes()
        )

    def _count_unused(self, size: int) -> None:
        """Limit the bytes that the parser buffers: headers, trailers, extensions."""
        self._unused_bytes = 0 if self._has_progress else self._unused_bytes + size
        if self._unused_bytes <= HEAD_BYTES or self.transport.is_closing():
            return
        if "head" not in self._timers:
            # The bytes belong to a body. The answer may have started, so it is too late
            # for a refusal.
            self.transport.close()
            return
        self._refuse(*TOO_LONG)

    def _limit_late_body(self) -> None:
        """Limit the time for the rest of a body after the answer is complete."""
        if self._has_late_body and "late" not in self._timers:
            self._limit_rest()

    def _limit_rest(self) -> None:
        close = self.transport.close
        self._timers["late"] = self.loop.call_later(self._limits.head_s, close)

    @property
    def _has_late_body(self) -> bool:
        """True while the rest of an already answered request arrives."""
        cycle = self.cycle
        return cycle is not None and cycle.response_complete and cycle.more_body

    def _limit_idle(self) -> None:
        """Limit the time after an empty line, which does not start a request."""
        cycle = self.cycle
        is_between = cycle is None or (cycle.response_complete and not cycle.more_body)
        has_timer = "head" in self._timers or self.timeout_keep_alive_task
        if is_between and not has_timer and not self.transport.is_closing():
            self._start_timer()

    def _start_timer(self) -> None:
        limit_s = self._limits.head_s
        text = f"headers took longer than {limit_s:g} s; send them faster"
        self._timers["head"] = self.loop.call_later(
            limit_s, self._refuse, "408 Request Timeout", text
        )

    def _stop_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def send_400_response(self, msg: str) -> None:
        self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, text: str) -> None:
        """Refuse a request, after the answers to earlier ones; close the connection."""
        self._stop_timer("head")
        if self._refusal:
            return
        body = f'{{"error": "{text}"}}'
        self._refusal = ANSWER.format(status, len(body), body).encode()
        cycle = self.cycle
        if cycle is not None and cycle.more_body and cycle in self._cycles:
            # The refused request is the current one, and its body stays incomplete.
            self._cycles.remove(cycle)
            cycle.disconnected = True
            cycle.message_event.set()
        if all(cycle.response_complete for cycle in self._cycles):
            self._send_refusal()

    def _send_refusal(self) -> None:
        """Send the refusal, discard further input for ``LINGER_S``, and close."""
        self.transport.write(self._refusal)
        self._recorder.closing()
        self._heads.is_discarding = True
        if len(self._lingering) >= LINGERING:
            self.transport.close()
            return
        self._lingering.add(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timers["linger"] = self.loop.call_later(LINGER_S, self.transport.close)


def protocol_of(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """Return the protocol factory of one server, for ``uvicorn.Config(http=...)``."""
    made: Any = partial(BoundedProtocol, limits, set[BoundedProtocol]())
    return cast("type[asyncio.Protocol]", made)
