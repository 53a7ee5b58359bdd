"""Clients that do not notice the loss of their gateway: every byte is compared."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.harness import WAIT_S, Served, served
from tests.serve.texts import asked, spec_of
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(240)

COUNT = 40


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_decoder(tmp_path_factory.mktemp("decoder"))
    spec = spec_of(folder)
    spec["gateway"]["replicas"] = 2
    with served(tmp_path_factory.mktemp("kept"), spec) as made:
        yield made


class Connection:
    """A connection, and what comes on it, byte by byte."""

    def __init__(self, service: Served) -> None:
        self.port = int(service.url.rpartition(":")[2])

    async def open(self) -> Connection:
        opened = await asyncio.open_connection("127.0.0.1", self.port)
        self.reader, self.writer = opened
        return self

    async def ask(self, path: str, body: dict[str, Any], headers: str = "") -> None:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        self.writer.write(f"{head}{headers}\r\n".encode() + content)
        await self.writer.drain()

    async def answer(self) -> tuple[str, bytes]:
        """Return the head and the body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        if "transfer-encoding: chunked" not in head:
            size = int(head.partition("content-length: ")[2].partition("\r")[0])
            return head, await self.reader.readexactly(size)
        return head, b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> Any:
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        assert await self.reader.readexactly(2) == b"\r\n"

    def close(self) -> None:
        self.writer.close()


def wanted(count: int = COUNT, **more: Any) -> dict[str, Any]:
    body = asked(count, **more)
    body |= body.pop("extra_body")
    return body


def shown(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, which has to be whole."""
    lines = body.decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line[6:]) for line in lines[:-2] if not line.startswith(":")]


def without_chance(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "id": "", "created": 0}


def gateways(service: Served) -> dict[str, int]:
    return {
        process.name: process.pid
        for process in service.status().processes
        if process.phase == "ready" and process.pid and not process.model
    }


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


async def ready_again(service: Served) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(await asyncio.to_thread(gateways, service)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def stream(
    connection: Connection, path: str, body: dict[str, Any], seen: asyncio.Queue[int]
) -> list[dict[str, Any]]:
    """Ask for a stream, and tell of each of its chunks; ask again on the connection."""
    await connection.ask(path, {**body, "stream": True})
    head = (await connection.reader.readuntil(b"\r\n\r\n")).decode()
    assert "200 OK" in head
    found, number = b"", 0
    async for chunk in connection.chunks():
        found += chunk
        number += 1
        seen.put_nowait(number)
    again = {**body, "max_tokens": 1, "stream": False, "stream_options": None}
    await connection.ask(path, again)
    head, answer = await connection.answer()
    assert "200 ok" in head, head
    assert len(json.loads(answer)["choices"]) == body.get("n", 1)
    connection.close()
    return shown(found)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", wanted()),
    "sampled": ("/v1/completions", wanted(temperature=1.0, seed=7, stop=["\x01"])),
    "two": ("/v1/completions", wanted(n=2, temperature=1.0, seed=3)),
    "usage": (
        "/v1/completions",
        wanted(stream_options={"include_usage": True, "continuous_usage_stats": True}),
    ),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("at", [1, 2, 17, 39, 41])
async def test_killed_gateway_cuts_no_stream(
    service: Served, kind: str, at: int
) -> None:
    path, body = BODIES[kind]
    if kind == "usage":
        body = {**body, "stream": True}
    seen: asyncio.Queue[int] = asyncio.Queue()
    undisturbed = await stream(await Connection(service).open(), path, body, seen)
    pids = await asyncio.to_thread(gateways, service)
    connections = [await Connection(service).open() for _ in range(6)]
    counts: list[asyncio.Queue[int]] = [asyncio.Queue() for _ in connections]
    tasks = [
        asyncio.ensure_future(stream(connection, path, body, count))
        for connection, count in zip(connections, counts, strict=True)
    ]
    async with asyncio.timeout(WAIT_S):
        while await counts[0].get() < at:
            pass
        kill(min(pids.values()))
        found = await asyncio.gather(*tasks)
    for events in found:
        assert len({event["id"] for event in events}) == 1
        plain = sorted(map(without_chance, events), key=str)
        assert plain == sorted(map(without_chance, undisturbed), key=str)
    await ready_again(service)
