"""The client of an engine's server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from multiworld.serve.engine.external.engine_server import (
    Answer,
    EngineServer,
    answer_of,
    wait_of,
)
from multiworld.serve.engine.external.whole_engine import RunFailedError


class Elsewhere:
    """A server that redirects its clients to a place that keeps their bodies."""

    def __init__(self) -> None:
        self.stolen = list[bytes]()

    async def moved(self, request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/stolen")

    async def steal(self, request: web.Request) -> web.Response:
        self.stolen.append(await request.read())
        return web.json_response({})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[tuple[EngineServer, Elsewhere]]:
    elsewhere, app = Elsewhere(), web.Application()
    app.router.add_route("*", "/stolen", elsewhere.steal)
    app.router.add_route("*", "/{path}", elsewhere.moved)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    client = EngineServer("it", f"http://{host}:{port}")
    yield client, elsewhere
    await client.close()
    await runner.cleanup()


async def test_redirects_are_not_followed(
    server: tuple[EngineServer, Elsewhere],
) -> None:
    """Prompts would go to the target, and a login page would pass for health."""
    client, elsewhere = server
    assert not await client.answers()
    with pytest.raises(RunFailedError, match="307"):
        await client.post("/x", {"prompt": "secret"})
    with pytest.raises(RunFailedError, match="307"):
        async for _ in client.events("/x", {"prompt": "secret"}):
            pass
    assert elsewhere.stolen == []


@pytest.mark.parametrize(
    ("given", "wait_s"),
    [
        ("3", 3.0),
        ("0", 0.0),
        ("999999999999999", 60.0),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
        ("Thu, 01 Jan 9999 00:00:10 GMT", 60.0),
        ("", 0.0),
        ("-3", 0.0),
        ("soon", 0.0),
        ("Thu, 99 Foo 1970", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(given: str, wait_s: float) -> None:
    """The wait is bounded, whatever a server says."""
    assert wait_of(given, 1000.0) == wait_s


async def test_byte_order_mark_hides_no_event() -> None:
    """Some servers write one; the first token would be lost."""

    async def events(request: web.Request) -> web.Response:
        return web.Response(body=b"\xef\xbb\xbfdata: 1\n\ndata: 2\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/x", events)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    client = EngineServer("it", f"http://{host}:{port}")
    try:
        assert [data async for data in client.events("/x", {})] == [b"1", b"2"]
    finally:
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    "data", [b'{"error": "\xff"}', b"[" * 100_000, b"{", b'{"error": 5, "x": [}']
)
def test_answer_that_is_no_json_is_a_failed_run(data: bytes) -> None:
    with pytest.raises(RunFailedError):
        answer_of(msgspec.json.Decoder(Answer), data)
