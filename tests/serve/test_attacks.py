"""Expensive request bodies: one client's must not delay another's."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.harness import ROOT, WAIT_S, Served, body, served, spec_with
from tests.tiers import some

pytestmark = pytest.mark.timeout(240)

INFER = "/v2/models/m/infer"
STALL_S = 0.25
"""Maximum seconds that an attack may add to another client's 99th percentile."""

SCHEMA_STALL_S = 2 * STALL_S
"""The same for eight clients at once, beside other tests on two slow cores."""

EMPTIES = b"[],"
MIB = 2**20


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_with()
    spec["models"]["m"]["stages"] = [{"name": n} for n in ("double", "add", "square")]
    spec["models"]["g"] = {
        "factory": "tests.serve.poisoned_decoder:model",
        "generation": {},
        "stages": [{"name": "front"}, {"name": "back"}],
    }
    spec["gateway"] = {"port": 0, "max_bodies_mb": 256.0, "spare": False}
    with served(tmp_path_factory.mktemp("attacks"), spec) as found:
        yield found


def gateway_of(service: Served) -> psutil.Process:
    (pid,) = [one.pid for one in service.status().processes if not one.model]
    assert pid is not None
    return psutil.Process(pid)


def with_data(data: bytes) -> bytes:
    text = json.dumps(body(1.0)).replace("[1.0]", "DATA", 1)
    return text.encode().replace(b"DATA", b"[" + data + b"]")


def filled(part: bytes, size: int) -> bytes:
    """Return ``size`` bytes of copies of ``part``, without its last comma."""
    return (part * (size // len(part)))[:-1]


ATTACKS = {
    "gzip of empty lists": (
        gzip.compress(with_data(filled(EMPTIES, 66 * MIB))),
        {"content-encoding": "gzip"},
        413,
    ),
    "numbers": (with_data(filled(b"1.2345678,", 7 * MIB)), {}, 400),
    "nesting": (with_data(b"[" * 3 * MIB + b"]" * 3 * MIB), {}, 400),
    "gzip of empty lists below the limit": (
        gzip.compress(with_data(filled(EMPTIES, 7 * MIB))),
        {"content-encoding": "gzip"},
        400,
    ),
    "empty lists": (with_data(filled(EMPTIES, 60 * MIB)), {}, 413),
    "numbers beyond the limit": (with_data(filled(b"1.2345678,", 60 * MIB)), {}, 413),
    "small numbers": (with_data(filled(b"1,", 7 * MIB)), {}, 400),
    "objects": (with_data(filled(b"{},", 7 * MIB)), {}, 400),
    "texts": (with_data(filled(b'"",', 7 * MIB)), {}, 400),
    "sizes": (
        json.dumps(body(1.0)).encode().replace(b"[1]", b"[%b]" % (b"1," * MIB + b"1")),
        {},
        400,
    ),
    "parameters": (
        b'{"inputs": [], "parameters": {"x": [%b]}}' % filled(EMPTIES, 7 * MIB),
        {},
        400,
    ),
}
"""Body, headers and expected status of each attack."""


def text_body(route: str, field: bytes) -> bytes:
    """Return a body of a text route, with 7 MiB of lists or texts in a field."""
    given = {
        "chat/completions": b'"messages": [{"role": "user", "content": [%b]}]',
        "completions": b'"prompt": "x", "metadata": [%b]',
        "embeddings": b'"input": [%b]',
    }
    return b'{"model": "m", %b}' % (given[route] % filled(field, 7 * MIB))


TEXT_ATTACKS = {
    "quotes in texts": ("completions", b'"\\\\\\"",'),
    "lists in a chat": ("chat/completions", EMPTIES),
    "texts in a chat": ("chat/completions", b'"",'),
    "lists in a completion": ("completions", EMPTIES),
    "numbers in a completion": ("completions", b"1,"),
    "texts to embed": ("embeddings", b'"",'),
}
"""Route and values of each attack on the routes for texts, answered with 400."""


def post(content: bytes, headers: Mapping[str, str], path: str = INFER) -> bytes:
    lines = {"host": "x", "content-length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content


async def best_p99_of(url: str, enough_s: float) -> float:
    """Return the best of three 99th percentiles: other tests may take the core once."""
    found_s = await p99_of(url)
    for _ in range(2):
        if found_s >= enough_s:
            found_s = min(found_s, await p99_of(url))
    return found_s


async def p99_of(url: str, count: int = 50) -> float:
    took: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        for number in range(count):
            began = time.monotonic()
            answer = await client.post(INFER, json=body(float(number)))
            took.append(time.monotonic() - began)
            assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.02)
    return statistics.quantiles(took, n=100)[98]


@pytest.fixture(scope="module")
def quiet_s(service: Served) -> float:
    """Return the 99th percentile of a client that is alone."""
    return asyncio.run(p99_of(service.url))


@contextlib.contextmanager
def attacking(
    service: Served, content: bytes, count: int = 1
) -> Iterator[list[dict[str, int]]]:
    """Send ``content`` again and again during the block, and collect the statuses."""
    host, port = service.url.removeprefix("http://").split(":")
    path = service.folder / "attack"
    path.write_bytes(content)
    attacker = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.serve.attacker",
            host,
            port,
            str(path),
            str(count),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    statuses: list[dict[str, int]] = []
    try:
        yield statuses
        out, _ = attacker.communicate(timeout=WAIT_S)
        statuses.append(json.loads(out))
    finally:
        attacker.kill()
        attacker.wait()


@pytest.mark.parametrize("name", some([*ATTACKS], 3))
async def test_expensive_body_delays_no_other_request(
    service: Served, quiet_s: float, name: str
) -> None:
    content, headers, status = ATTACKS[name]
    with attacking(service, post(content, headers)) as statuses:
        found_s = await best_p99_of(service.url, quiet_s + STALL_S)
    assert statuses[0].pop(str(status)) > 0
    # The answer may come before the body was sent, and the end of the connection is
    # then all that a simple client sees.
    assert not statuses[0].keys() - {"closed"}
    assert found_s < quiet_s + STALL_S


@pytest.mark.parametrize("name", some([*TEXT_ATTACKS], 2))
async def test_expensive_compressed_body_delays_no_other_request(
    service: Served, quiet_s: float, name: str
) -> None:
    """It is packed into some kilobytes, so it is sent as fast as it is answered."""
    route, field = TEXT_ATTACKS[name]
    packed = gzip.compress(text_body(route, field))
    content = post(packed, {"content-encoding": "gzip"}, f"/v1/{route}")
    with attacking(service, content) as statuses:
        found_s = await best_p99_of(service.url, quiet_s + STALL_S)
    assert statuses[0].pop("400") > 0
    assert not statuses[0].keys() - {"closed"}
    assert found_s < quiet_s + STALL_S


SCHEMAS: dict[str, dict[str, Any]] = {
    "properties": {"properties": {f"p{n}": {"type": "string"} for n in range(2_000)}},
    "values": {"prefixItems": [{}] * 14_000},
    "alternatives": {"anyOf": [{"type": "integer"}] * 2_600},
    "patterns": {"patternProperties": {f"a{n}": True for n in range(3_000)}},
}
"""Schemas of about 60 kB that took seconds to check."""


@pytest.mark.parametrize("name", some([*SCHEMAS], 1))
async def test_expensive_schema_delays_no_other_request(
    service: Served, quiet_s: float, name: str
) -> None:
    schema = {"allOf": [SCHEMAS[name], {"$ref": "#/nowhere"}]}
    asked = {
        "model": "g",
        "messages": [{"role": "user", "content": "x"}],
        "structured_outputs": {"json": schema},
    }
    content = post(json.dumps(asked).encode(), {}, "/v1/chat/completions")
    with attacking(service, content, 8) as statuses:
        found_s = await best_p99_of(service.url, quiet_s + SCHEMA_STALL_S)
    assert statuses[0].pop("400") > 0
    assert not statuses[0].keys() - {"closed"}
    assert found_s < quiet_s + SCHEMA_STALL_S


async def test_bodies_of_many_connections_are_bounded_together(service: Served) -> None:
    gateway = gateway_of(service)
    before = gateway.memory_info().rss
    size = 59 * MIB
    head = {"inference-header-content-length": "100", "content-length": str(size + 1)}
    whole = post(b"x" * size, head)
    host, port = service.url.removeprefix("http://").split(":")
    held: list[socket.socket] = []
    try:
        for _ in range(24):
            sock = socket.create_connection((host, int(port)), timeout=WAIT_S)
            held.append(sock)
            with contextlib.suppress(OSError):  # refused before it has sent all
                await asyncio.to_thread(sock.sendall, whole)
        assert gateway.memory_info().rss - before < 600 * MIB
        answered, _, _ = select.select(held, [], [], 1.0)
        assert len(answered) == 24 - 256 // 59
        assert all(sock.recv(4096).startswith(b"HTTP/1.1 503") for sock in answered)
        async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
            answer = await client.post(INFER, json=body(1.0))
        assert answer.status_code == 200
    finally:
        for sock in held:
            sock.close()


async def test_refused_body_is_answered_with_the_reason(service: Served) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT_S) as client:
        content, headers, status = ATTACKS["gzip of empty lists"]
        answer = await client.post(INFER, content=content, headers=headers)
    assert answer.status_code == status
    assert "JSON is larger than 8 MiB" in answer.json()["error"]
