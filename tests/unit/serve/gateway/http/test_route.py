"""The route table: paths, checks before a handler, and counts of answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from multiworld.errors import OverloadedError
from multiworld.serve.gateway.http.app import App, make_app
from multiworld.serve.gateway.http.calls import AdmittedCall, Call
from multiworld.serve.gateway.http.http_responses import EventStream, event_of
from multiworld.serve.gateway.http.route import Needs, Route, Tag, pattern_of, respond
from multiworld.serve.gateway.http_routes import ROUTES
from multiworld.serve.tenants.directory import Tenant
from tests.unit.serve.gateway.fakes import Fake

METHODS = {n: "POST" if n is Needs.BODY else "GET" for n in Needs}
VERSIONED = "/v2/models/{name}[/versions/{version}]/infer"


async def named(call: Call) -> Response:
    return Response(f"{call.name} {call.version} {call.tenant.name}")


async def broken(call: Call) -> Response:
    raise ZeroDivisionError("a bug")


async def refusing(call: Call) -> Response:
    raise OverloadedError("too much", retry_after_s=2.0)


async def receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


def request(**headers: str) -> Request:
    encoded = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": encoded})


def to(handler: Any) -> Route:
    return Route("POST", "/{name}", handler, Needs.BODY, Tag.INFERENCE)


def table(*rows: tuple[str, str, Any, Needs, Tag]) -> tuple[Route, ...]:
    return tuple(Route(*row) for row in rows)


async def ask(app: App, method: str, path: str, **more: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return await client.request(method, path, **more)


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/v2/models/m/infer", 200, "m None "),
        ("POST", "/v2/models/a%20b/infer", 200, "a b None "),
        ("POST", "/v2/models/m/versions/7/infer", 200, "m 7 "),
        ("POST", "/v2/models/a/b/infer", 404, "not found"),
        ("POST", "/v2/models//infer", 404, "not found"),
        ("POST", "/v2/models/m/inferx", 404, "not found"),
        ("GET", "/v2/models/m/infer", 405, "method not allowed"),
    ],
)
async def test_only_whole_paths_match(
    method: str, path: str, status: int, text: str
) -> None:
    routes = table(("POST", VERSIONED, named, Needs.BODY, Tag.INFERENCE))
    answer = await ask(make_app(Fake().gateway, routes), method, path)
    assert (answer.status_code, text in answer.text) == (status, True)


async def test_405_lists_the_methods_of_the_path() -> None:
    routes = table(
        ("POST", "/a", named, Needs.BODY, Tag.OPENAI),
        ("GET", "/a", named, Needs.NOTHING, Tag.OPENAI),
        ("POST", "/b", named, Needs.BODY, Tag.OPENAI),
    )
    app = make_app(Fake().gateway, routes)
    assert (await ask(app, "PUT", "/a")).headers["Allow"] == "GET, HEAD, POST"
    assert (await ask(app, "GET", "/b")).headers["Allow"] == "POST"
    assert (await ask(app, "HEAD", "/a")).status_code == 200


async def test_what_a_route_needs_is_checked_before_its_handler() -> None:
    fake = Fake(Tenant(name="acme"), Tenant(name="boss", is_operator=True))
    routes = table(
        *((METHODS[n], f"/{n.name}", named, n, Tag.INFERENCE) for n in Needs)
    )
    app = make_app(fake.gateway, routes)
    found: dict[tuple[Needs, str], int] = {}
    for needs in Needs:
        for who in ("", "acme", "boss"):
            key = {"authorization": f"Bearer {fake.keys[who]}"} if who else {}
            answer = await ask(app, METHODS[needs], f"/{needs.name}", headers=key)
            found[needs, who] = answer.status_code
    wanted: dict[tuple[Needs, str], int] = {
        **{(Needs.NOTHING, who): 200 for who in ("", "acme", "boss")},
        **{(needs, ""): 401 for needs in Needs if needs is not Needs.NOTHING},
        **{(Needs.TENANT, who): 200 for who in ("acme", "boss")},
        **{(Needs.BODY, who): 200 for who in ("acme", "boss")},
        (Needs.OPERATOR, "acme"): 401,
        (Needs.OPERATOR, "boss"): 200,
    }
    assert found == wanted


@pytest.mark.parametrize("needs", [Needs.NOTHING, Needs.BODY])
async def test_errors_have_the_form_of_the_tag(needs: Needs) -> None:
    method = "GET" if needs is Needs.NOTHING else "POST"
    routes = table(
        (method, "/ours", refusing, needs, Tag.INFERENCE),
        (method, "/theirs", refusing, needs, Tag.OPENAI),
        (method, "/bug", broken, needs, Tag.OPENAI),
    )
    app = make_app(Fake().gateway, routes)
    ours, theirs = await ask(app, method, "/ours"), await ask(app, method, "/theirs")
    assert (ours.status_code, ours.json()) == (429, {"error": "too much"})
    assert theirs.json()["error"]["code"] == "rate_limit_exceeded"
    assert theirs.headers["Retry-After"] == "2"
    bug = await ask(app, method, "/bug")
    assert (bug.status_code, bug.json()["error"]["code"]) == (500, "internal_error")
    assert "a bug" not in bug.text


async def test_resources_of_a_call_are_released_when_its_answer_has_ended() -> None:
    """This holds even if the client leaves before the first event."""
    given_back: list[str] = []

    async def one() -> Any:
        yield event_of("x")

    async def stream(call: AdmittedCall) -> Response:
        call.held.callback(given_back.append, call.name)
        return EventStream(one())

    routes = table(("POST", "/{name}", stream, Needs.BODY, Tag.OPENAI))
    fake = Fake()
    app = make_app(fake.gateway, routes)
    assert "x" in (await ask(app, "POST", "/whole")).text
    assert given_back == ["whole"]

    async def send(message: Any) -> None:
        raise OSError("the client is gone")

    scope = {"type": "http", "method": "POST", "path": "/left", "headers": []}
    with pytest.raises(BaseException):  # noqa: B017, PT011 as starlette raises it
        await app({**scope, "asgi": {"spec_version": "2.4"}}, receive, send)
    await asyncio.sleep(0)
    assert given_back == ["whole", "left"]
    assert fake.requests()["unknown", "499"] == 1.0


def test_no_two_routes_take_the_same_request() -> None:
    seen: dict[tuple[str, str], Route] = {}
    for route in ROUTES:
        for path in route.paths:
            key = route.method, re.sub(r"{\w+}", "{}", path)
            assert key not in seen, (route, seen[key])
            seen[key] = route
            assert pattern_of(path).fullmatch(re.sub(r"{\w+}", "x", path))


def test_every_route_is_described() -> None:
    assert all(route.summary_and_description[0] for route in ROUTES)


# What is counted.


async def test_answer_is_counted_for_its_model_and_its_tenant() -> None:
    """A model that the tenant may not use counts as unknown."""
    fake = Fake(Tenant(name="acme", models=("m",)))
    door = fake.gateway.authenticator
    asked = request(authorization=f"Bearer {fake.keys['acme']}")

    async def handler(call: AdmittedCall) -> Response:
        door.count_bytes(call.admitted, 5)
        return Response(b"1234567")

    for name in ("m", "t", "none"):
        await respond(fake.gateway, to(handler), asked, {"name": name})
    assert fake.requests() == {("m", "200"): 1.0, ("unknown", "200"): 2.0}
    rows = [row for _, told in door.meter.take_due(1e9) for row in told]
    by_model = {row.model: (row.requests, row.bytes_in, row.bytes_out) for row in rows}
    assert by_model == {"m": (1, 5, 7), "unknown": (2, 10, 14)}
    assert door.limiter.in_flight("acme") == 0


async def test_bytes_of_a_stream_are_counted_as_they_are_sent() -> None:
    fake = Fake(Tenant(name="acme", models=("m",), bytes_per_s=0.1))
    door = fake.gateway.authenticator
    asked = request(authorization=f"Bearer {fake.keys['acme']}")

    async def events() -> AsyncGenerator[bytes]:
        yield b"12345"
        with pytest.raises(OverloadedError, match="bytes"):
            door.admit(asked.headers)
        yield b"123"

    async def handler(call: AdmittedCall) -> Response:
        return EventStream(events())

    answer = await respond(fake.gateway, to(handler), asked, {"name": "m"})
    assert isinstance(answer, EventStream)

    async def send(message: Any) -> None:
        pass

    await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    rows = [row for _, told in door.meter.take_due(1e9) for row in told]
    assert {row.model: row.bytes_out for row in rows}["m"] == 8 + len(EventStream.last)


async def test_bytes_sent_after_the_end_of_a_kept_stream_are_counted() -> None:
    fake = Fake()
    door = fake.gateway.authenticator
    admitted = door.admit(request().headers)
    door.count_sent(admitted, 3)
    door.finish(admitted, "m", 200)
    door.count_sent(admitted, 4)
    rows = [row for _, told in door.meter.take_due(1e9) for row in told]
    assert [(row.model, row.requests, row.bytes_out) for row in rows] == [("m", 1, 7)]


async def test_readers_of_a_kept_stream_are_charged() -> None:
    """Each time that they read it."""
    fake = Fake(Tenant(name="acme"))
    sent = 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size

    async def events() -> AsyncGenerator[bytes]:
        for _ in range(10):
            yield b"data: x\n\n"

    log = fake.gateway.event_logs.begin("s", "acme", 60.0, on_read=count)
    log.fill(events(), lambda: None)
    async with fake.client("acme") as client:
        sizes = [len((await client.get("/v1/streams/s")).content) for _ in range(3)]
    assert sent == sum(sizes) > 200
    log.end()


async def test_name_of_the_model_may_be_known_after_the_answer_only() -> None:
    fake = Fake()

    async def handler(call: AdmittedCall) -> Response:
        call.admitted.model = "t"
        return Response(b"")

    await respond(fake.gateway, to(handler), request(), {})
    assert fake.requests() == {("t", "200"): 1.0}


async def test_cancelled_answer_is_counted_and_its_slot_released() -> None:
    """499 is nginx's status for it."""
    fake = Fake(Tenant(name="acme", max_parallel_requests=1))
    asked = request(x_api_key=fake.keys["acme"])
    started = asyncio.Event()

    async def handler(call: AdmittedCall) -> Response:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    running = asyncio.ensure_future(
        respond(fake.gateway, to(handler), asked, {"name": "m"})
    )
    await started.wait()
    assert fake.gateway.authenticator.limiter.in_flight("acme") == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert fake.gateway.authenticator.limiter.in_flight("acme") == 0
    assert fake.requests() == {("m", "499"): 1.0}
