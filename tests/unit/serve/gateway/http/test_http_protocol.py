"""Limits of the HTTP protocol, with a real server on loopback and clients of bytes."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import socket
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from multiworld.serve.gateway.http import http_protocol
from multiworld.serve.gateway.http.embedded_server import EmbeddedServer
from multiworld.serve.gateway.http.http_protocol import (
    CONTINUE,
    CYCLE_INTERNALS,
    HEAD_BYTES,
    INTERNALS,
    BoundedProtocol,
    ConnectionLimits,
    HeadBuffer,
    protocol_of,
)
from multiworld.serve.gateway.http.http_request import CONNECTION
from tests.unit.serve.edges import HANG_S, until

LARGE = 20_000_000
"""Bytes of the answer at ``/large``: more than the sockets hold."""

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


HEADERS = list[Any]()
"""Headers of each request that was answered with the length of its body."""

WAITING = set[int]()
"""Open requests at ``/wait`` and ``/works``."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body, except at a few paths."""
    if scope["path"] == "/wait":
        WAITING.add(id(scope))
        while (await receive())["type"] != "http.disconnect":
            pass
        WAITING.discard(id(scope))
        return
    if scope["path"] == "/works":  # works on a request that it has read
        while (await receive())["more_body"]:
            pass
        WAITING.add(id(scope))
        lost = asyncio.Event()
        scope[CONNECTION].on_lost.add(lost.set)
        await lost.wait()
        WAITING.discard(id(scope))
        return
    if scope["path"] == "/parts":  # without a known length
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"01234", b"", b"56789"):
            more = part != b"56789"
            await send({"type": "http.response.body", "body": part, "more_body": more})
        return
    if scope["path"] == "/slow":
        head = {"status": 200, "headers": [(b"content-length", b"10")]}
        await send({"type": "http.response.start", **head})
        for part in (b"01234", b"56789"):
            more = part == b"01234"
            await send({"type": "http.response.body", "body": part, "more_body": more})
            await asyncio.sleep(0.5)
        return
    size, is_more = 0, scope["path"] != "/early"
    while is_more:
        message = await receive()
        size += len(message.get("body", b""))
        is_more = message.get("more_body", False)
    text = str(size).encode()
    HEADERS.append(list(scope["headers"]))
    if scope["path"] == "/large":
        text = b"x" * LARGE
    if scope["path"] == "/middle":
        text = b"x" * 40_000
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


class Client:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> bytes:
        async with asyncio.timeout(HANG_S):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def read(self, count: int) -> bytes:
        async with asyncio.timeout(HANG_S):
            return await self._reader.readexactly(count)

    async def answer(self) -> tuple[int, bytes]:
        async with asyncio.timeout(HANG_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            lines = head.decode().lower().split("\r\n")
            (length,) = [
                int(n.partition(":")[2])
                for n in lines
                if n.startswith("content-length")
            ]
            body = await self._reader.readexactly(length)
        return int(lines[0].split()[1]), body

    async def ask(self, data: bytes = GET) -> tuple[int, bytes]:
        self.send(data)
        return await self.answer()

    async def is_closed(self, limit_s: float = HANG_S) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                return await self._reader.read(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    def stop_reading(self) -> None:
        transport = self._writer.transport
        assert isinstance(transport, asyncio.ReadTransport)
        transport.pause_reading()

    async def count_slowly(self) -> int:
        count = 0
        async with asyncio.timeout(HANG_S):
            while count < LARGE:
                count += len(await self._reader.read(1 << 20))
                await asyncio.sleep(0.01)  # slower than the server
        return count

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass  # the server closed first


class Server:
    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        client = Client(*await asyncio.open_connection("127.0.0.1", port))
        self.clients.append(client)
        return client

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    @property
    def head_bytes(self) -> int:
        """Bytes of unfinished heads that the server has read."""
        connections = self._server.server_state.connections
        return sum(int(vars(one)["_unused_bytes"]) for one in connections)

    async def reads_more_than(self, before: int) -> None:
        await until(lambda: self.head_bytes != before)


@asynccontextmanager
async def serving(
    head_s: float = 30.0, most: int = 100, keep_alive_s: float = 30
) -> AsyncIterator[Server]:
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=protocol_of(ConnectionLimits(head_s, most)),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=1,
    )
    server = EmbeddedServer(config)
    running = asyncio.ensure_future(server.serve())
    made = Server(server)
    try:
        await until(lambda: server.started)
        yield made
    finally:
        for client in made.clients:
            await client.close()
        server.end()
        await asyncio.wait_for(running, HANG_S)


async def test_http_1_0_client_gets_no_chunks() -> None:
    """A response of unknown length ends with the connection (RFC 9112, 6.3)."""
    async with serving() as server:
        client = await server.connect()
        client.send(b"GET /parts HTTP/1.0\r\n\r\n")
        head = (await client.head()).lower()
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert await client.read(10) == b"0123456789"
        with pytest.raises(asyncio.IncompleteReadError):
            await client.read(1)
        client = await server.connect()
        assert await client.ask(b"GET / HTTP/1.0\r\n\r\n") == (200, b"0")
        client = await server.connect()
        client.send(GET.replace(b"/", b"/parts", 1))
        assert b"transfer-encoding: chunked" in (await client.head()).lower()


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GET /\r\n\r\n", b"HTTP/0.9 is not served"),
        (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", b"HTTP/0.9 is not served"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"HTTP/2.0 is not served"),
        (b"GET / HTTP/1.1\r\n\r\n", b"0 Host headers"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"2 Host headers"),
    ],
)
async def test_request_without_a_version_or_host_is_refused(
    head: bytes, words: bytes
) -> None:
    async with serving() as server:
        client = await server.connect()
        status, body = await client.ask(head)
        assert status == 400
        assert words in body


async def test_connection_serves_request_after_request() -> None:
    async with serving() as server:
        client = await server.connect()
        assert await client.ask() == (200, b"0")
        client.send(GET + GET)
        assert [await client.answer() for _ in range(2)] == [(200, b"0")] * 2
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le")
        client.send(b"ngth: 5\r\n\r\nab")
        client.send(b"cde")
        assert await client.answer() == (200, b"5")
        chunks = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert await client.ask(head + chunks) == (200, b"5")


@pytest.mark.parametrize(
    "sent", [b"", b"GET", GET[:-2], b"GET / HTTP/1.1\r\nHost: x\r\nX: "]
)
async def test_head_that_does_not_arrive_gets_408(sent: bytes) -> None:
    async with serving(head_s=0.05) as server:
        client = await server.connect()
        client.send(sent)
        status, body = await client.answer()
        assert (status, b"longer than 0.05 s" in body) == (408, True)
        assert await client.is_closed()
        await until(lambda: server.connections == 0)


async def test_time_for_a_later_head_begins_with_its_first_byte() -> None:
    async with serving(head_s=0.1) as server:
        client = await server.connect()
        assert (await client.ask())[0] == 200
        await asyncio.sleep(0.2)  # longer than a head may take
        assert (await client.ask())[0] == 200
        client.send(GET[:5])
        assert (await client.answer())[0] == 408


async def test_empty_line_does_not_keep_a_connection_open() -> None:
    """It starts no request, but ends the idle time."""
    async with serving(head_s=0.1) as server:
        client = await server.connect()
        assert (await client.ask())[0] == 200
        client.send(b"\r\n")
        assert (await client.answer())[0] == 408
        assert await client.is_closed()


async def test_requests_that_wait_behind_each_other_are_bounded() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(GET.replace(b"GET / ", b"GET /wait ") + GET * 5000)
        assert await client.is_closed()
        await until(lambda: server.connections == 0)


async def test_client_that_leaves_ends_the_requests_before_its_last_one() -> None:
    """uvicorn notifies only the last request."""
    async with serving() as server:
        client = await server.connect()
        client.send(GET.replace(b"GET / ", b"GET /wait ") + GET)
        await until(lambda: WAITING)
        await client.close()
        await until(lambda: not WAITING)


async def test_body_may_take_longer_than_a_head() -> None:
    """Bodies have their own time limit."""
    async with serving(head_s=0.05) as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na")
        await asyncio.sleep(0.1)  # longer than a head may take
        client.send(b"b")
        assert await client.answer() == (200, b"2")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHo", 408),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 431),
        (b"GET / HTTP/1.1\r\nauthorization: a\r\nauthorization: b\r\n\r\n", 400),
        (b"\0\0\0", 400),
    ],
)
async def test_refusal_comes_after_the_answer_before_it(
    sent: bytes, status: int
) -> None:
    """Inside the body of a response it would desynchronise clients and proxies."""
    async with serving(head_s=0.2) as server:
        client = await server.connect()
        client.send(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200")
        client.send(sent)
        assert await client.read(10) == b"0123456789"
        assert (await client.answer())[0] == status
        assert await client.is_closed()


async def test_long_head_in_segments_is_refused_after_the_answer_before_it() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.head()).startswith(b"HTTP/1.1 200")
        client.send(b"GET / HTTP/1.1\r\n")
        for number in range(4):
            await asyncio.sleep(0.05)
            client.send(b"x%d: " % number + b"y" * 30_000 + b"\r\n")
        assert await client.read(10) == b"0123456789"
        assert (await client.answer())[0] == 431


async def test_broken_body_is_refused_at_once() -> None:
    async with serving() as server:
        client = await server.connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head + b"ZZ\r\n")
        assert (await client.answer())[0] == 400
        assert await client.is_closed()


async def test_long_head_gets_431() -> None:
    async with serving() as server:
        for step in (HEAD_BYTES + 1000, 1000):
            client = await server.connect()
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
            sent = 0
            while sent <= HEAD_BYTES:
                client.send(b"x" * step)
                sent += step
            assert (await client.answer())[0] == 431
            assert await client.is_closed()
    async with serving() as server:
        client = await server.connect()
        for number in range(3):  # each head is counted by itself
            before = server.head_bytes if number else 0
            client.send(GET[:-2] + b"X: " + b"x" * (HEAD_BYTES - 1000 - number))
            await server.reads_more_than(before)
            assert (await client.ask(b"\r\n\r\n"))[0] == 200


async def test_large_body_is_not_counted_as_a_head() -> None:
    async with serving() as server:
        client = await server.connect()
        size = 3 * HEAD_BYTES
        head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
        assert await client.ask(head + b"x" * size) == (200, str(size).encode())
        assert await client.ask() == (200, b"0")


async def test_connection_over_the_limit_gets_503_until_another_ends() -> None:
    async with serving(most=2) as server:
        first, second = await server.connect(), await server.connect()
        assert [(await c.ask())[0] for c in (first, second)] == [200, 200]
        third = await server.connect()
        status, body = await third.answer()
        assert (status, b"limit of 2 connections" in body) == (503, True)
        assert await third.is_closed()
        assert (await first.ask())[0] == 200
        await first.close()
        await until(lambda: server.connections == 1)
        fourth = await server.connect()
        assert (await fourth.ask())[0] == 200


async def test_client_that_still_sends_reads_the_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is not reset at once, but only a few may linger."""
    monkeypatch.setattr(http_protocol, "LINGERING", 1)
    async with serving(most=1) as server:
        first = await server.connect()
        second, third = await server.connect(), await server.connect()
        await until(lambda: server.connections == 2)
        for _ in range(3):
            second.send(b"POST / HTTP/1.1\r\nHost: x\r\n")
            await asyncio.sleep(0.01)
        assert (await second.answer())[0] == 503
        assert (await third.answer())[0] == 503
        assert (await first.ask())[0] == 200
        await second.close()
        await until(lambda: server.connections == 1)


async def test_refused_connections_take_no_slot() -> None:
    async with serving(most=1) as server:
        first, second = await server.connect(), await server.connect()
        assert (await second.answer())[0] == 503
        await first.close()
        await until(lambda: server.connections == 1)
        third = await server.connect()
        assert (await third.ask())[0] == 200


@pytest.mark.parametrize("before", [b"", GET])
async def test_nothing_is_served_after_a_refusal(
    before: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """That includes the rest of the refused request, and ``100 Continue``."""
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    async with serving() as server:
        client = await server.connect()
        client.send(before + head + b"Expect: 100-continue\r\n\r\nZZZ\r\n")
        if before:
            assert (await client.answer())[0] == 200
        assert (await client.answer())[0] == 400
        assert await client.is_closed()
    assert "Exception in ASGI" not in caplog.text


async def test_refused_connection_is_closed_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.05)
    async with serving(most=1) as server:
        first, second = await server.connect(), await server.connect()
        assert (await second.answer())[0] == 503
        await until(lambda: server.connections == 1)
        assert (await first.ask())[0] == 200


async def test_client_that_hangs_up_leaves_nothing() -> None:
    async with serving(head_s=0.05) as server:
        for sent in (b"", GET[:9], b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\na"):
            client = await server.connect()
            client.send(sent)
            await until(lambda: server.connections == 1)
            await client.close()
            await until(lambda: server.connections == 0)


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01\x02\x00\x01", b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
)
async def test_bytes_that_are_no_request_get_400(sent: bytes) -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(sent)
        head = await client.head()
        assert head.startswith(b"HTTP/1.1 400")
        assert (await (await server.connect()).ask())[0] == 200


async def test_body_before_a_piece_of_the_next_head_is_not_counted() -> None:
    """A client may pipeline its next request."""
    async with serving() as server:
        client = await server.connect()
        size = HEAD_BYTES + 1000
        head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode()
        client.send(head + b"x" * size + GET[:9])
        assert (await client.answer())[0] == 200
        assert (await client.ask(GET[9:]))[0] == 200


async def test_connection_whose_body_was_not_read_is_closed_after_a_while() -> None:
    async with serving(keep_alive_s=0.05) as server:
        client = await server.connect()
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        assert (await client.ask(head + b"a"))[0] == 200
        assert await client.is_closed()


async def test_body_that_nobody_reads_any_more_does_not_hold_its_connection() -> None:
    """A trickle of bytes would otherwise hold one of few connections for ever."""
    async with serving(head_s=0.05, keep_alive_s=0.05) as server:
        client = await server.connect()
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        assert (await client.ask(head + b"a"))[0] == 200
        client.send(b"b")
        assert await client.is_closed(limit_s=1.0)


async def test_trailers_are_bounded_as_heads_are() -> None:
    """Otherwise one connection fills the memory and blocks the event loop."""
    async with serving() as server:
        client = await server.connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head + b"0\r\nX: ")
        client.send(b"x" * 4 * HEAD_BYTES)
        assert await client.is_closed(limit_s=1.0)


async def test_trailers_are_no_headers() -> None:
    """A proxy that strips a header does not look at trailers (RFC 9110, 6.5.1)."""
    async with serving() as server:
        client = await server.connect()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head + b"0\r\nAuthorization: a\r\nAuthorization: b\r\n\r\n")
        assert await client.answer() == (200, b"0")
        assert HEADERS[-1] == [(b"host", b"x"), (b"transfer-encoding", b"chunked")]


# Bytes that arrive at once, and clients that read nothing.


async def test_many_requests_in_one_segment_are_all_answered() -> None:
    body = b"x" * 10_000
    post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with serving() as server:
        client = await server.connect()
        client.send((post + body) * 20)
        for _ in range(20):
            assert await client.answer() == (200, b"10000")


async def test_headers_are_counted_however_many_come_in_one_read() -> None:
    """The parser sees a whole read at once, so the read must not set the limit."""
    line = b"X-Header: " + b"x" * 90 + b"\r\n"
    async with serving() as server:
        few = await server.connect()
        head = b"GET / HTTP/1.1\r\nHost: x\r\n" + line * 500 + b"\r\n"
        assert (await few.ask(head))[0] == 200
        many = await server.connect()
        status, text = await many.ask(
            b"GET / HTTP/1.1\r\nHost: x\r\n" + line * 1000 + b"\r\n"
        )
        assert (status, b"headers are longer" in text) == (431, True)
        assert await many.is_closed()
        long = await server.connect()
        assert (await long.ask(b"GET /" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\n\r\n"))[
            0
        ] == 431


@pytest.mark.parametrize("name", [b"Authorization", b"X-API-Key"])
async def test_two_keys_in_one_request_are_refused(name: bytes) -> None:
    """Otherwise one key could be checked and the other one used."""
    line = name + b": Bearer a\r\n"
    async with serving() as server:
        client = await server.connect()
        one = b"GET / HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n"
        assert (await client.ask(one))[0] == 200
        assert (await client.ask(one))[0] == 200
        two = b"GET / HTTP/1.1\r\nHost: x\r\n" + line + line.lower() + b"\r\n"
        assert (await client.ask(two))[0] == 400
        assert await client.is_closed()


async def test_client_that_reads_nothing_of_its_answer_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise its answer would stay in memory for ever."""
    monkeypatch.setattr(http_protocol, "STALL_S", 0.2)
    ask = b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n"
    async with serving() as server:
        deaf, slow = await server.connect(), await server.connect()
        deaf.stop_reading()
        deaf.send(ask)
        slow.send(ask)
        assert await slow.count_slowly() > LARGE
        await until(lambda: server.connections == 1)


async def test_rest_of_an_answer_that_nobody_reads_keeps_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing a transport waits for unsent bytes without a time limit."""
    monkeypatch.setattr(http_protocol, "STALL_S", 0.2)
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    protocol = protocol_of(ConnectionLimits(30.0, 9))
    config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    made: Any = config.http_protocol_class
    loop = asyncio.get_running_loop()
    await loop.connect_accepted_socket(lambda: made(config, state, {}), ours)
    theirs.send(b"GET /middle HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await until(lambda: bool(state.connections))
    await until(lambda: not state.connections)
    theirs.close()


class Written:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def test_head_of_an_answer_goes_with_what_follows_it() -> None:
    """This saves a packet."""
    transport = Written()
    given: Any = transport
    keeper = HeadBuffer(given)
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    keeper.write(CONTINUE)
    assert transport.parts == [CONTINUE]
    keeper.write(head)
    assert transport.parts == [CONTINUE]
    keeper.write(b"ab")
    keeper.write(b"more")
    assert transport.parts[1:] == [head + b"ab", b"more"]
    keeper.write(head)
    keeper.flush()
    keeper.flush()
    assert transport.parts[3:] == [head]
    keeper.write(head)
    assert not keeper.is_closing()
    keeper.close()
    assert transport.parts[4:] == [head]
    assert keeper.is_closing()


async def test_answer_without_a_body_is_sent() -> None:
    """Its head must not wait for a body."""
    async with serving() as server:
        client = await server.connect()
        for _ in range(2):
            client.send(b"HEAD / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"content-length: 1" in await client.head()


async def test_client_that_waits_with_its_body_is_asked_for_it() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert await client.head() == CONTINUE
        assert await client.ask(b"hello") == (200, b"5")


UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
)
"""Headers of the first request of Java's HttpClient and ``curl --http2``."""

BODIES = {
    "none": (b"GET", b"", b"0"),
    "whole": (b"POST", b"Content-Length: 5\r\n\r\nhello", b"5"),
    "chunked": (
        b"POST",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n0\r\n\r\n",
        b"2",
    ),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_upgrade_that_is_not_done_is_ignored(kind: str, piece: int) -> None:
    method, rest, size = BODIES[kind]
    text = method + b" / HTTP/1.1\r\nHost: x\r\n" + UPGRADE + (rest or b"\r\n")
    async with serving() as server:
        client = await server.connect()
        for begin in range(0, len(text), piece):
            client.send(text[begin : begin + piece])
            await asyncio.sleep(0)
        assert await client.answer() == (200, size)
        assert await client.ask() == (200, b"0")


async def test_many_upgrades_at_once_take_no_more_memory_than_their_bytes() -> None:
    head = b"GET / HTTP/1.1\r\nHost:a\r\nConnection:upgrade\r\nUpgrade:a\r\n\r\n"
    async with serving() as server:
        client = await server.connect()
        tracemalloc.start()
        try:
            client.send(head * 4000)
            assert await client.is_closed()  # more requests than may be pipelined
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 20 * len(head * 4000)


async def test_tunnel_is_refused() -> None:
    """The parser treats CONNECT as an upgrade, too."""
    async with serving() as server:
        client = await server.connect()
        status, _ = await client.ask(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == 405
        assert await client.is_closed()


@pytest.mark.parametrize("more", [b"", GET], ids=["alone", "pipelined"])
async def test_client_that_leaves_is_noticed_however_long_its_body_was(
    more: bytes,
) -> None:
    """Reading pauses while a body waits to be read, and must resume afterwards."""
    size = 100_000
    head = b"POST /works HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
    async with serving() as server:
        client = await server.connect()
        client.send(head)
        await until(lambda: bool(server.connections))
        await asyncio.sleep(0.05)  # so that the request waits for its body
        client.send(b"x" * size + more)
        await until(lambda: bool(WAITING))
        await client.close()
        await until(lambda: not WAITING)


# Internals of uvicorn.


def names_on(tree: ast.AST, *owners: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in owners
        and not node.attr.startswith("__")
    }


def test_what_is_used_of_uvicorn_is_listed_and_there() -> None:
    """A uvicorn release that renames an internal fails here instead of under load."""
    tree = ast.parse(inspect.getsource(BoundedProtocol))
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    own |= {n for n in names_on(tree, "self") if n.startswith("_")} - INTERNALS
    asyncio_names = set(dir(asyncio.Protocol))
    extended = own & set(dir(HttpToolsProtocol)) - asyncio_names
    used = (names_on(tree, "self") - own - asyncio_names) | extended
    assert {n for n in used if not n.startswith("__")} == INTERNALS
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    loop = asyncio.new_event_loop()
    there = HttpToolsProtocol(config, ServerState(), {}, loop)
    loop.close()
    # ``url`` is set with the first request.
    assert {n for n in INTERNALS if not hasattr(there, n)} <= {"url"}
    assert "self.url" in inspect.getsource(HttpToolsProtocol)


def test_what_is_used_of_a_cycle_is_listed_and_there() -> None:
    tree = ast.parse(inspect.getsource(http_protocol))
    used = names_on(tree, "cycle", "c", "self.cycle") - {"_cycles"}
    assert used == CYCLE_INTERNALS
    source = inspect.getsource(RequestResponseCycle)
    assert [n for n in used if not re.search(rf"(self\.|def ){n}\b", source)] == []
