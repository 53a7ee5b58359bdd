"""The dashboard's server: who gets in, what is asked, and readers that are slow."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
import orjson
import pytest
from starlette.testclient import TestClient

from multiworld.errors import ServeError
from multiworld.serve.controller import answers
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.observe.facts import Facts, GatewayFacts, Series
from multiworld.serve.dashboard import server
from multiworld.serve.dashboard.server import PAGE, Watch, make_dashboard
from tests.meta import vendored

HANG_S = 20.0
HERE = "http://127.0.0.1:8265"
ORIGIN = {"origin": HERE}


def facts(**changes: Any) -> Facts:
    return Facts(
        **{
            "app": "a",
            "url": "http://127.0.0.1:1",
            "at": 1.0,
            "is_ready": True,
            "controller": 1,
            "trouble": "",
            "models": {},
            "replicas": {},
            "gateways": {},
            "tenants": {},
            "nodes": {},
            "events": (),
            "thoughts": (),
            **changes,
        }
    )


TENANT = answers.TenantShown(
    name="acme",
    models=("*",),
    rpm_limit=None,
    max_parallel_requests=None,
    bytes_per_s=None,
    tpm_limit=None,
    weight=1.0,
    priority=0,
    is_operator=False,
    is_suspended=False,
    keys=(answers.KeyShown("k1", 1.0, None),),
)
TENANT_WITH_KEY = answers.TenantWithKey(**msgspec.structs.asdict(TENANT), key="mw-k1-s")


class Controller:
    """Answers in place of a service's controller."""

    def __init__(self) -> None:
        self.facts = facts()
        self.asked: list[tuple[str, Any]] = []
        self.error = ""

    def ask(self, method: str, path: str, kind: type, **more: Any) -> Any:
        if self.error:
            raise ServeError(self.error)
        self.asked.append((path, more.get("json")))
        if path.startswith("/tenants"):
            return [TENANT] if method == "GET" else TENANT_WITH_KEY
        return {
            "/spec": answers.SpecShown("app: a", "", ("m: no version serves, not 1",)),
            "/facts": self.facts,
            "/series": Series({}),
            "/scale": answers.Scaled(1, 2),
        }[path]


def visitor(
    controller: Controller, key: str = "", base: str = HERE
) -> httpx.AsyncClient:
    app = make_dashboard(cast("Service", controller), key)
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url=base)


async def test_page_comes_with_nothing_from_elsewhere() -> None:
    async with visitor(Controller()) as http:
        page = await http.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in ("main.js", "panels.js", "facts.js", "style.css", "icon.svg"):
            part = await http.get(f"/page/{name}")
            assert part.status_code == 200
            assert "http" not in part.text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8265", ""])
async def test_other_host_is_refused_without_a_key(host: str) -> None:
    """A page of elsewhere may have its name lead to this machine."""
    async with visitor(Controller()) as http:
        answer = await http.get("/", headers={"host": host})
    assert answer.status_code == 403


@pytest.mark.parametrize("headers", [{}, {"origin": "http://evil.example"}])
async def test_operation_from_another_page_is_refused(headers: dict[str, str]) -> None:
    controller = Controller()
    async with visitor(controller) as http:
        answer = await http.post("/do/scale", json={}, headers=headers)
    assert answer.status_code == 403
    assert controller.asked == []


async def test_operation_is_asked_of_the_controller() -> None:
    controller = Controller()
    what = {"model": "m", "stage": "back", "replicas": 2}
    async with visitor(controller) as http:
        answer = await http.post("/do/scale", json=what, headers=ORIGIN)
    assert (answer.status_code, answer.json()) == (200, {"before": 1, "replicas": 2})
    assert controller.asked == [("/scale", what)]


async def test_keys_are_those_of_tenants() -> None:
    controller = Controller()
    async with visitor(controller) as http:
        (shown,) = (await http.get("/tenants")).json()
        body = {"name": "a/../b", "grace_s": 5}
        made = await http.post("/do/tenant_rotate", json=body, headers=ORIGIN)
        unnamed = await http.post("/do/tenant_rotate", json={}, headers=ORIGIN)
    assert (shown["name"], shown["keys"][0]["id"]) == ("acme", "k1")
    assert made.json()["key"] == "mw-k1-s"
    assert controller.asked[-1] == ("/tenants/a%2F..%2Fb/rotate", {"grace_s": 5})
    assert unnamed.status_code == 400


async def test_refusal_of_the_controller_is_shown() -> None:
    controller = Controller()
    controller.error = "no such stage"
    async with visitor(controller) as http:
        answer = await http.post("/do/scale", json={}, headers=ORIGIN)
    assert (answer.status_code, answer.json()) == (502, {"error": "no such stage"})


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/do/shutdown", b"{}", 404),
        ("/do/scale", b"{", 400),
        ("/do/scale", b" " * (server.BODY_BYTES + 1), 400),
    ],
)
async def test_wrong_operation_is_refused(path: str, body: bytes, status: int) -> None:
    async with visitor(Controller()) as http:
        answer = await http.post(path, content=body, headers=ORIGIN)
    assert answer.status_code == status


async def test_key_is_wanted_and_kept_as_a_cookie() -> None:
    async with visitor(Controller(), "secret", "http://machine.example:8265") as http:
        assert (await http.get("/")).status_code == 401
        assert (await http.get("/?key=wrong")).status_code == 401
        assert (await http.get("/facts?key=secret")).status_code == 401
        answer = await http.get("/?key=secret")
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert (await http.get("/")).status_code == 200


async def test_logs_are_those_of_the_service(tmp_path: Path) -> None:
    log = tmp_path / "gateway-1.log"
    log.write_bytes(b"x" * server.LOG_BYTES + b"the end")
    controller = Controller()
    controller.facts = facts(
        gateways={
            "gateway/1": GatewayFacts(phase="ready", since_s=1, pid=1, log=str(log))
        }
    )
    service = cast("Service", controller)
    async with visitor(controller) as http:
        assert (await http.get("/logs/gateway/1")).status_code == 404, "not looked yet"
    watch = Watch(service)
    async for _ in limited(watch.events(), 1):
        assert watch.facts["gateways"]["gateway/1"]["log"] == str(log)
    assert server.end_of(log).endswith(b"the end")
    assert len(server.end_of(log)) == server.LOG_BYTES
    assert b"cannot be read" in server.end_of(tmp_path / "none")


def test_chat_without_a_gateway_says_so() -> None:
    app = make_dashboard(cast("Service", Controller()), "")
    with TestClient(cast("Any", app), base_url=HERE) as http:
        found = http.post("/chat", headers={"origin": HERE}, json={})
    assert found.status_code == 502
    assert "no gateway answers" in found.json()["error"]


async def test_spec_is_shown() -> None:
    async with visitor(Controller()) as http:
        found = (await http.get("/spec")).json()
    assert found["text"] == "app: a"
    assert found["differences"] == ["m: no version serves, not 1"]


async def test_way_of_a_request_is_what_all_logs_say_of_it(tmp_path: Path) -> None:
    logs = {
        "gateway-1": [
            "2026-11-29 16:57:01,123 INFO a: begun [request r-1]",
            "2026-11-29 16:57:03,123 INFO a: retried [request r-1]",
            "2026-11-29 16:57:03,200 INFO a: begun [request r-12]",
        ],
        "m-0-3": [
            "2026-11-29 16:57:02,000 WARNING a: raised [request r-1]",
            "ValueError: x",
        ],
    }
    for name, lines in logs.items():
        (tmp_path / f"{name}.log").write_text("\n".join(lines))
    controller: Any = Controller()
    controller.folder = SimpleNamespace(logs=tmp_path)
    async with visitor(controller) as http:
        found = (await http.get("/requests/r-1")).json()
    assert [each["process"] for each in found] == ["gateway-1", "m-0-3", "gateway-1"]
    assert found[1]["text"].endswith("ValueError: x")


async def limited(events: AsyncIterator[bytes], count: int) -> AsyncIterator[bytes]:
    async with asyncio.timeout(HANG_S):
        async for event in events:
            yield event
            count -= 1
            if not count:
                break
    await cast("Any", events).aclose()


def told(event: bytes) -> tuple[str, Any]:
    kind, _, data = event.decode().partition("\n")
    return kind.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))


async def test_reader_gets_all_facts_and_then_what_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    controller = Controller()
    found: list[tuple[str, Any]] = []
    async for event in limited(Watch(cast("Service", controller)).events(), 2):
        found.append(told(event))
        controller.facts = facts(tokens=7)
    assert [kind for kind, _ in found] == ["facts", "patch"]
    assert found[0][1]["app"] == "a"
    assert found[1][1] == {"tokens": 7}


async def test_events_are_packed_one_by_one() -> None:
    async def events() -> AsyncGenerator[bytes]:
        yield b"event: a\n\n"
        yield b"event: b\n\n" * 1000

    unpacker = zlib.decompressobj(wbits=31)
    found = [unpacker.decompress(part) async for part in server.compressed(events())]
    assert found == [b"event: a\n\n", b"event: b\n\n" * 1000]


async def test_service_that_does_not_answer_is_said_to_be_in_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.01)
    controller = Controller()
    found: list[tuple[str, Any]] = []
    async for event in limited(Watch(cast("Service", controller)).events(), 2):
        found.append(told(event))
        controller.error = "no controller answers"
    assert found[1][1] == {
        "troubles": [
            "the service does not respond; everything below is out of date: "
            "no controller answers"
        ],
        "is_old": True,
    }


async def test_slow_reader_skips_to_the_latest_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.001)
    controller = Controller()
    events = Watch(cast("Service", controller)).events()
    async with asyncio.timeout(HANG_S):
        assert told(await anext(events))[0] == "facts"
        for number in range(1, 100):
            controller.facts = facts(tokens=number)
            await asyncio.sleep(0.001)
        seen = len(controller.asked) + 2
        while len(controller.asked) < seen:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert told(await anext(events)) == ("patch", {"tokens": 99})
    await cast("Any", events).aclose()


async def test_page_that_reads_slowly_finds_few_old_facts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each poll has 20 KB of changes; the page reads none during 150 polls."""
    monkeypatch.setattr(server, "LOOK_S", 0.002)

    class Changing(Controller):
        def ask(self, method: str, path: str, kind: type, **more: Any) -> Any:
            self.facts = facts(app=os.urandom(10_000).hex(), tokens=len(self.asked))
            return super().ask(method, path, kind, **more)

    controller = Changing()
    page = make_dashboard(cast("Service", controller))
    running = server.PageServer(page, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    with running.bind() as sock, socket.socket() as client:
        serving = asyncio.ensure_future(running.serve(sockets=[sock]))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        async with asyncio.timeout(HANG_S):
            while not running.started:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await loop.sock_connect(client, sock.getsockname())
            request = b"GET /facts HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
            await loop.sock_sendall(client, request)
            while len(controller.asked) < 150:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            latest, found = len(controller.asked), b""
            while latest > max(
                map(int, re.findall(rb'"tokens":(\d+)', found)), default=0
            ):
                found += await loop.sock_recv(client, 65536)
        running.should_exit = running.force_exit = True
        page.end()
        await serving
    assert len(found) < 400_000, "150 polls are 3 MB"


async def test_nobody_looks_when_nobody_reads() -> None:
    controller = Controller()
    watch = Watch(cast("Service", controller))
    async for _ in limited(watch.events(), 1):
        pass
    asked = len(controller.asked)
    await asyncio.sleep(0.05)
    assert len(controller.asked) == asked
    assert watch.facts == {}


def test_vendored_libraries_are_those_that_were_published() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (PAGE / "vendor").iterdir()
    }
    assert found == vendored.DIGESTS, "run: python -m tests.meta.vendored"
