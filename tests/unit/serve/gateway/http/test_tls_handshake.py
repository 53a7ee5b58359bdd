"""Limits of TLS handshakes, with a real server on loopback."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvicorn

from multiworld.serve.gateway.http.embedded_server import EmbeddedServer
from multiworld.serve.gateway.http.http_protocol import ConnectionLimits, protocol_of
from multiworld.serve.gateway.http.tls_handshake import Certificate, with_tls
from tests.unit.serve.edges import HANG_S, until

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LARGE = 10_000_000
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def app(scope: Any, receive: Any, send: Any) -> None:
    text = scope["scheme"].encode()
    if scope["path"] == "/large":
        text = b"x" * LARGE
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


class Server:
    def __init__(self, server: EmbeddedServer, trust: ssl.SSLContext) -> None:
        self._server, self._trust = server, trust
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def trust(self, trust: ssl.SSLContext) -> None:
        self._trust = trust

    async def connect(self, *, has_tls: bool = True) -> Pair:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        more = {"ssl": self._trust, "server_hostname": "localhost"} if has_tls else {}
        reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)  # type: ignore[arg-type]
        self._writers.append(writer)
        return reader, writer

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


def issue(folder: Path) -> ssl.SSLContext:
    """Write a certificate of a new authority; return a context that trusts it."""
    authority = trustme.CA()
    issued, chain, key = authority.issue_cert("localhost"), folder / "c", folder / "k"
    issued.private_key_pem.write_to_path(str(key))
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(chain), append=number > 0)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    return trust


@asynccontextmanager
async def serving(
    folder: Any, head_s: float = 30.0, most: int = 100
) -> AsyncIterator[Server]:
    trust = issue(folder)
    certificate = Certificate(str(folder / "c"), str(folder / "k"))
    limits = ConnectionLimits(head_s, most)
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=with_tls(protocol_of(limits), certificate, limits),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = EmbeddedServer(config)
    running = asyncio.ensure_future(server.serve())
    made = Server(server, trust)
    try:
        await until(lambda: server.started)
        yield made
    finally:
        made.hang_up()
        server.end()
        await asyncio.wait_for(running, HANG_S)


async def answer(pair: Pair) -> bytes:
    pair[1].write(GET)
    async with asyncio.timeout(HANG_S):
        head = await pair[0].readuntil(b"\r\n\r\n")
        return head.split(b"\r\n")[0] + b" " + await pair[0].readexactly(5)


async def closed(pair: Pair) -> bool:
    """Wait until the server closes a connection; return whether it sent nothing."""
    try:
        async with asyncio.timeout(HANG_S):
            return await pair[0].read() == b""
    except ConnectionError:
        return True


async def test_connection_is_one_of_https(tmp_path: Any) -> None:
    async with serving(tmp_path) as server:
        pair = await server.connect()
        for _ in range(2):
            assert await answer(pair) == b"HTTP/1.1 200 OK https"


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02", GET])
async def test_handshake_that_is_not_completed_is_ended(
    tmp_path: Any, sent: bytes
) -> None:
    async with serving(tmp_path, head_s=0.1) as server:
        pair = await server.connect(has_tls=False)
        pair[1].write(sent)
        with_alert = await asyncio.wait_for(pair[0].read(), HANG_S)
        assert not with_alert.startswith(b"HTTP")
        assert server.connections == 0


async def test_slow_reader_gets_all_of_a_last_answer(tmp_path: Any) -> None:
    async with serving(tmp_path, head_s=0.3) as server:
        reader, writer = await server.connect()
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        count = 0
        async with asyncio.timeout(HANG_S):
            while data := await reader.read(1 << 19):
                count += len(data)
                await asyncio.sleep(0.05)  # a second in all
        assert count > LARGE


async def test_handshakes_count_as_connections(tmp_path: Any) -> None:
    async with serving(tmp_path, most=3) as server:
        first = await server.connect()
        silent = [await server.connect(has_tls=False) for _ in range(3)]
        assert await closed(await server.connect(has_tls=False))
        assert await answer(first) == b"HTTP/1.1 200 OK https"
        for pair in silent:
            pair[1].transport.abort()
        for _ in range(100):
            try:
                second = await server.connect()
                break
            except OSError:
                await asyncio.sleep(0.01)
        assert await answer(second) == b"HTTP/1.1 200 OK https"


async def test_connection_that_is_lost_after_its_handshake_is_forgotten(
    tmp_path: Any,
) -> None:
    """Its request, and the end of the connection, may come with the handshake's end."""
    async with serving(tmp_path) as server:
        for _ in range(20):
            _, writer = await server.connect()
            writer.write(GET)
            writer.transport.abort()
        await until(lambda: server.connections == 0)
        assert await answer(await server.connect()) == b"HTTP/1.1 200 OK https"


async def test_renewed_certificate_is_used_at_once(tmp_path: Path) -> None:
    """Open connections keep the old one; a certificate without its key is not used."""
    async with serving(tmp_path) as server:
        old = await server.connect()
        key = (tmp_path / "k").read_bytes()
        renewed = issue(tmp_path)
        fresh = (tmp_path / "k").read_bytes()
        (tmp_path / "k").write_bytes(key)
        await answer(await server.connect())
        (tmp_path / "k").write_bytes(fresh)
        server.trust(renewed)
        assert await answer(await server.connect()) == await answer(old)
