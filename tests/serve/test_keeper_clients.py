"""Unmodified HTTP clients whose gateway is killed in the midst of an answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import psutil
import pytest
import requests

from tests.serve.harness import WAIT_S, Served, served
from tests.serve.test_keeper import (
    Connection,
    gateways,
    kill,
    ready_again,
    shown,
    wanted,
    without_chance,
)
from tests.serve.test_keeper_faults import holder
from tests.serve.texts import spec_of
from tests.tiny_decoder import save_decoder

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

BODY = wanted(40, stream=True, temperature=1.0, seed=11)

MANY = 10 * 2**20
"""Bytes of a large body."""

Tell = Callable[[], None]
"""Called once a client has read a part of its answer."""

NODE = """
const http = require("http");
const [url, body] = process.argv.slice(1);
const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
const headers = { "content-type": "application/json" };
const ask = (tell) => new Promise((resolve, reject) => {
  const request = http.request(url, { method: "POST", agent, headers }, (answer) => {
    let text = "";
    answer.on("data", (part) => {
      if (tell && !text) process.stderr.write(".");
      text += part;
    });
    answer.on("end", () => resolve(text));
    answer.on("error", reject);
  });
  request.on("error", reject);
  request.end(body);
});
(async () => {
  const both = [await ask(true), await ask(false)];
  process.stdout.write(JSON.stringify(both));
})();
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_of(save_decoder(tmp_path_factory.mktemp("decoder")))
    spec["gateway"] |= {"replicas": 2, "max_json_mb": 16.0}
    with served(tmp_path_factory.mktemp("clients"), spec) as made:
        yield made


# Each client sends the request twice, on one connection, and returns both answers.


def by_standard_library(url: str, tell: Tell) -> list[bytes]:
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=WAIT_S)
    found = []
    for _ in range(2):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", where.path, json.dumps(BODY), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        first = answer.read1(1)
        tell()
        found.append(first + answer.read())
    connection.close()
    return found


def by_requests(url: str, tell: Tell) -> list[bytes]:
    with requests.Session() as session:
        return [_by_requests(session, url, tell) for _ in range(2)]


def _by_requests(session: requests.Session, url: str, tell: Tell) -> bytes:
    with session.post(url, json=BODY, stream=True, timeout=WAIT_S) as answer:
        assert answer.status_code == 200
        parts = answer.iter_content(None)
        found = next(parts)
        tell()
        return found + b"".join(parts)


def by_httpx(url: str, tell: Tell) -> list[bytes]:
    limits = httpx.Limits(max_connections=1)
    with httpx.Client(timeout=WAIT_S, limits=limits) as session:
        return [_by_httpx(session, url, tell) for _ in range(2)]


def _by_httpx(session: httpx.Client, url: str, tell: Tell) -> bytes:
    with session.stream("POST", url, json=BODY) as answer:
        assert answer.status_code == 200
        parts = answer.iter_bytes()
        found = next(parts)
        tell()
        return found + b"".join(parts)


def by_aiohttp(url: str, tell: Tell) -> list[bytes]:
    async def ask() -> list[bytes]:
        found = []
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for _ in range(2):
                async with session.post(url, json=BODY) as answer:
                    assert answer.status == 200
                    first = await answer.content.readany()
                    tell()
                    found.append(first + await answer.read())
        return found

    return asyncio.run(ask())


def by_curl(url: str, tell: Tell) -> list[bytes]:
    words = ["curl", "-sSN", "--fail", "--max-time", str(WAIT_S), "-d", "@-"]
    process = subprocess.Popen(
        [*words, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin as given:
        given.write(json.dumps(BODY).encode())
        given.close()
        first = process.stdout.read(1)
        tell()
        found = first + process.stdout.read()
    assert process.returncode == 0
    return [found]


def by_node(url: str, tell: Tell) -> list[bytes]:
    process = subprocess.Popen(
        ["node", "-e", NODE, url, json.dumps(BODY)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        assert process.stderr.read(1) == b"."
        tell()
        found = json.loads(process.stdout.read())
    assert process.returncode == 0
    return [each.encode() for each in found]


CLIENTS: dict[str, Callable[[str, Tell], list[bytes]]] = {
    "http.client": by_standard_library,
    "requests": by_requests,
    "httpx": by_httpx,
    "aiohttp": by_aiohttp,
    "curl": by_curl,
    "node": by_node,
}


def events(found: bytes) -> list[dict[str, Any]]:
    return [without_chance(event) for event in shown(found)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", CLIENTS)
async def test_client_notices_nothing(
    service: Served, name: str, number: signal.Signals
) -> None:
    if name in ("curl", "node") and shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    url = f"{service.url}/v1/completions"
    client = CLIENTS[name]
    undisturbed = events((await asyncio.to_thread(client, url, lambda: None))[0])
    reading = threading.Event()
    asking = asyncio.ensure_future(asyncio.to_thread(client, url, reading.set))
    assert await asyncio.to_thread(reading.wait, WAIT_S)
    kill(await asyncio.to_thread(holder, service), number)
    async with asyncio.timeout(WAIT_S):
        found = await asking
    assert [events(each) for each in found] == [undisturbed] * len(found)
    await ready_again(service)


async def test_client_that_has_closed_its_side_counts_as_gone(service: Served) -> None:
    """For a gateway that takes over, too: its connection ends, and is not kept."""
    connection = await Connection(service).open()
    await connection.ask("/v1/completions", wanted(400, stream=True))
    await connection.reader.readuntil(b"\r\n\r\n")
    kill(await asyncio.to_thread(holder, service))
    connection.writer.write_eof()
    async with asyncio.timeout(WAIT_S):
        await connection.reader.read()
        while any(  # noqa: ASYNC110 - no event
            each.laddr.port == connection.port and each.status != psutil.CONN_LISTEN
            for each in psutil.Process(service.keeper()).net_connections("tcp")
        ):
            await asyncio.sleep(0.05)
    connection.close()
    await ready_again(service)


async def test_body_of_ten_megabytes_outlives_gateways(service: Served) -> None:
    """Hit while it is read, and while its answer streams."""
    content = json.dumps(BODY).encode()
    content += b" " * (MANY - len(content))
    connection = await Connection(service).open()
    undisturbed = None
    for is_hit in (False, True):
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {MANY}"
        connection.writer.write(f"{head}\r\n\r\n".encode() + content[: MANY // 2])
        await connection.writer.drain()
        if is_hit:
            await asyncio.sleep(0.2)  # it is half read
            for pid in (await asyncio.to_thread(gateways, service)).values():
                kill(pid)
        connection.writer.write(content[MANY // 2 :])
        async with asyncio.timeout(WAIT_S):
            answered = await connection.reader.readuntil(b"\r\n\r\n")
            assert b" 200 OK" in answered
            chunks = connection.chunks()
            parts = [await anext(chunks)]
            if is_hit:
                kill(await asyncio.to_thread(holder, service))
            parts += [part async for part in chunks]
        found = events(b"".join(parts))
        undisturbed = undisturbed or found
        assert found == undisturbed
    connection.close()
    await ready_again(service)
