"""Streams whose clients vanish and read on, at any gateway, which may be lost, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.harness import WAIT_S, Served, served
from tests.serve.test_keeper import (
    BODIES,
    Connection,
    gateways,
    kill,
    ready_again,
    without_chance,
)
from tests.serve.texts import spec_of
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(240)

COUNT = 120
PATH, BODY = "/v1/completions", {**BODIES["sampled"][1], "max_tokens": COUNT}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_of(save_decoder(tmp_path_factory.mktemp("decoder")))
    spec["gateway"]["replicas"] = 2
    with served(tmp_path_factory.mktemp("kept"), spec) as made:
        yield made


class Events:
    """The events of an answer, by their numbers."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.found: dict[int, str] = {}
        self.head = ""

    async def begin(self, **more: Any) -> Events:
        body = {**BODY, "stream": True, "detach_s": 60.0, **more}
        await self.connection.ask(PATH, body)
        return await self._headed()

    async def again(self, name: str, after: int, *, is_query: bool = False) -> Events:
        path, headers = f"/v1/streams/{name}", f"Last-Event-ID: {after}\r\n"
        if is_query:
            path, headers = f"{path}?starting_after={after}", ""
        self.connection.writer.write(
            f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()
        )
        return await self._headed()

    async def _headed(self) -> Events:
        async with asyncio.timeout(WAIT_S):
            head = await self.connection.reader.readuntil(b"\r\n\r\n")
        self.head = head.decode()
        return self

    @property
    def name(self) -> str:
        path = self.head.lower().partition("content-location: ")[2]
        return path.partition("\r")[0].removeprefix("/v1/streams/")

    async def take(self, count: int) -> Events:
        """Read ``count`` more events, or all that come."""
        assert "200 OK" in self.head, (
            self.head,
            await self.connection.reader.read(400),
        )
        async with asyncio.timeout(WAIT_S):
            async for chunk in self.connection.chunks():
                for event in filter(None, chunk.decode().split("\n\n")):
                    number, _, data = event.partition("\n")
                    at = int(number.removeprefix("id: "))
                    assert at not in self.found, "an event came twice"
                    self.found[at] = data
                    count -= 1
                if count <= 0:
                    break
        return self

    def leave(self) -> Events:
        self.connection.writer.transport.abort()
        return self


async def begun(service: Served, **more: Any) -> Events:
    return await Events(await Connection(service).open()).begin(**more)


async def again(service: Served, name: str, after: int, **more: Any) -> Events:
    events = Events(await Connection(service).open())
    return await events.again(name, after, **more)


def whole(*parts: Events) -> list[Any]:
    """Return the events of all parts, which have to overlap nowhere."""
    found: dict[int, str] = {}
    for part in parts:
        assert not found.keys() & part.found.keys()
        found |= part.found
    assert sorted(found) == list(range(1, len(found) + 1))
    *events, last = (found[number].removeprefix("data: ") for number in sorted(found))
    assert last == "[DONE]"
    return [without_chance(json.loads(event)) for event in events]


@pytest.fixture(scope="module")
def undisturbed(service: Served) -> list[Any]:
    async def read() -> list[Any]:
        events = await (await begun(service)).take(10**6)
        events.leave()
        return whole(events)

    return asyncio.run(read())


@pytest.mark.parametrize("is_query", [False, True])
async def test_client_reads_on_at_any_gateway(
    service: Served, undisturbed: list[Any], is_query: bool
) -> None:
    for _ in range(6):  # gateways take turns
        first = (await (await begun(service)).take(5)).leave()
        rest = await again(service, first.name, 5, is_query=is_query)
        await rest.take(10**6)
        assert whole(first, rest) == undisturbed
        rest.leave()


async def test_stream_is_read_by_two_clients_and_again(
    service: Served, undisturbed: list[Any]
) -> None:
    first = await (await begun(service)).take(3)
    other = await again(service, first.name, 0)
    await asyncio.gather(first.take(10**6), other.take(10**6))
    late = await (await again(service, first.name, 7)).take(10**6)
    assert whole(first) == whole(other) == undisturbed
    assert late.found == {n: e for n, e in first.found.items() if n > 7}
    for each in (first, other, late):
        each.leave()


@pytest.mark.parametrize(
    ("count", "pause_s"),
    [(4, 0.0), (4, 0.2), (10**6, 0.2)],
    ids=["vanishes with its gateway", "vanished before", "had all of it"],
)
async def test_stream_without_a_client_survives_its_gateway(
    service: Served, undisturbed: list[Any], count: int, pause_s: float
) -> None:
    streams = [(await (await begun(service)).take(count)).leave() for _ in range(4)]
    await asyncio.sleep(pause_s)  # for the gateways to see that the clients have left
    for pid in (await asyncio.to_thread(gateways, service)).values():
        kill(pid)
    for first in streams:
        rest = await (await again(service, first.name, 3)).take(10**6)
        for number in range(4, len(first.found) + 1):
            assert rest.found[number] == first.found.pop(number)
        assert whole(first, rest) == undisturbed
        rest.leave()
    await ready_again(service)


async def test_reader_of_a_kept_stream_notices_no_loss(
    service: Served, undisturbed: list[Any]
) -> None:
    first = (await (await begun(service)).take(3)).leave()
    readers = [await again(service, first.name, 3) for _ in range(4)]
    for count, reader in enumerate(readers):
        if count:
            await reader.take(count)
    for pid in (await asyncio.to_thread(gateways, service)).values():
        kill(pid)
    for reader in readers:
        await reader.take(10**6)
        assert whole(first, reader) == undisturbed
        reader.leave()
    await ready_again(service)


async def test_stream_is_forgotten_after_its_time(service: Served) -> None:
    first = (await (await begun(service, detach_s=0.2)).take(3)).leave()
    await asyncio.sleep(1.0)
    gone = await again(service, first.name, 3)
    assert "404 Not Found" in gone.head
    gone.leave()


async def test_cancelled_stream_ends_for_its_readers(service: Served) -> None:
    first = await (await begun(service, max_tokens=200)).take(3)
    connection = await Connection(service).open()
    await connection.ask(f"/v1/streams/{first.name}/cancel", {})
    head, _ = await connection.answer()
    assert "200 ok" in head
    await first.take(10**6)
    assert len(first.found) < 200
    gone = await again(service, first.name, 0)
    assert "404 Not Found" in gone.head
    for each in (first, gone):
        each.leave()
    connection.close()


@pytest.mark.parametrize("detach_s", [-1.0, 1e9])
async def test_time_that_is_not_allowed_is_refused(
    service: Served, detach_s: float
) -> None:
    refused = await begun(service, detach_s=detach_s)
    assert "400 Bad Request" in refused.head
    refused.leave()


async def test_stream_is_not_kept_unless_it_is_asked_for(service: Served) -> None:
    first = await begun(service, detach_s=None)
    assert not first.name
    first.leave()
