"""Clients that do not notice the loss of their gateway: every byte is compared."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from multiworld.serve.controller.answers import Drained
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.keeper.keeper import MAX_LOSSES
from tests.serve.harness import WAIT_S, Served, served
from tests.serve.texts import Stream, asked, client, spec_of
from tests.tiers import some
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(240)

COUNT = 40
PAUSE_S = 3.0  # longer than the silence after which a process counts as lost


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
    found = {**event, "id": "", "created": 0}
    if event["choices"] and event["choices"][0]["finish_reason"] is None:
        found["usage"] = None  # counts tokens that have arrived, and are not shown yet
    return found


def gateways(service: Served) -> dict[str, int]:
    return {
        process.name: process.pid
        for process in service.status().processes
        if process.pid and process.phase == "ready" and not process.model
        if is_living(process.pid)
    }


def versions(service: Served) -> set[str]:
    """Return the versions of which there are replicas."""
    return {each.version for each in service.status().processes if each.model}


def drain(service: Served, name: str) -> None:
    service.ask("POST", "/drain", Drained, json={"name": name})


def is_living(pid: int | None) -> bool:
    """Return whether a process runs; the controller hears of its end later."""
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    assert pid > 0  # 0: this process, too
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
@pytest.mark.parametrize("at", some([1, 17, 41, 2, 39], 3))
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


async def keeper_again(service: Served, before: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while service.keeper() in (0, before):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def keeper_has(service: Served, count: int) -> None:
    """Wait until gateways have given the keeper their connections."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(psutil.Error):
                held = psutil.Process(service.keeper()).net_connections("tcp")
                if sum(each.status == "ESTABLISHED" for each in held) >= count:
                    return
            await asyncio.sleep(0.02)


class Streams:
    """Some streams that are long enough to be hit while they run."""

    def __init__(self, service: Served, count: int = 6, tokens: int = COUNT) -> None:
        self.service, self.count = service, count
        path, body = BODIES["sampled"]
        self.body = {**body, "max_tokens": tokens}
        self.seen: asyncio.Queue[int] = asyncio.Queue()
        self.path = path

    async def __aenter__(self) -> Streams:
        connection = await Connection(self.service).open()
        none: asyncio.Queue[int] = asyncio.Queue()
        self.undisturbed = await stream(connection, self.path, self.body, none)
        connections = [await Connection(self.service).open() for _ in range(self.count)]
        self.tasks = [
            asyncio.ensure_future(stream(each, self.path, self.body, self.seen))
            for each in connections
        ]
        return self

    async def have(self, chunk: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.seen.get() < chunk:
                pass

    async def __aexit__(self, *failure: object) -> None:
        async with asyncio.timeout(WAIT_S):
            found = await asyncio.gather(*self.tasks)
        wanted = list(map(without_chance, self.undisturbed))
        for events in found:
            assert list(map(without_chance, events)) == wanted
        await ready_again(self.service)


async def test_gateway_that_hangs_is_killed_and_cuts_no_stream(service: Served) -> None:
    pids = await asyncio.to_thread(gateways, service)
    async with Streams(service) as streams:
        await streams.have(3)
        hung = min(pids.values())
        kill(hung, signal.SIGSTOP)
        async with asyncio.timeout(WAIT_S):
            while is_living(hung):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    (name,) = (name for name, pid in pids.items() if pid == hung)

    def losses() -> list[HistoryEntry]:
        return [each for each in service.events("lost") if each.name == name]

    await asyncio.to_thread(service.until, lambda: bool(losses()), "the loss is told")
    (lost,) = await asyncio.to_thread(losses)
    assert "it was stopped for" in lost.text
    assert "and the stream keeper killed it" in lost.text


async def test_two_gateways_are_lost_at_once(service: Served) -> None:
    pids = await asyncio.to_thread(gateways, service)
    async with Streams(service) as streams:
        await streams.have(3)
        for pid in pids.values():
            kill(pid)


@pytest.mark.heavy
async def test_gateways_that_are_killed_as_they_start_cut_no_stream(
    service: Served,
) -> None:
    """More of them than may be lost with a request that may be the cause."""
    lost: set[int] = set()
    async with Streams(service, count=3) as streams:
        await streams.have(3)
        async with asyncio.timeout(WAIT_S):
            while len(lost) < 2 * MAX_LOSSES:
                found = await asyncio.to_thread(service.status)
                pids = {p.pid for p in found.processes if p.pid and not p.model}
                for pid in pids - lost:
                    kill(pid)
                lost |= pids
                await asyncio.sleep(0.02)


async def test_keeper_is_lost_and_then_a_gateway(service: Served) -> None:
    pids = await asyncio.to_thread(gateways, service)
    async with Streams(service, tokens=200) as streams:
        await streams.have(2)
        before = service.keeper()
        kill(before)
        await keeper_again(service, before)
        await keeper_has(service, streams.count)
        kill(min(pids.values()))


async def test_keeper_that_hangs_is_replaced(service: Served) -> None:
    async with Streams(service) as streams:
        await streams.have(2)
        before = service.keeper()
        kill(before, signal.SIGSTOP)
        await keeper_again(service, before)


async def test_keeper_outlives_a_pause_of_its_controller(service: Served) -> None:
    before, process = service.keeper(), service.process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S)
    process.send_signal(signal.SIGCONT)
    await asyncio.sleep(1.0)
    assert service.keeper() == before
    await ready_again(service)


async def test_client_that_connects_while_there_is_nobody_waits(
    service: Served,
) -> None:
    pids = await asyncio.to_thread(gateways, service)
    for pid in [service.keeper(), *pids.values()]:
        kill(pid)
    connection = await Connection(service).open()
    await connection.ask("/v1/completions", wanted(3))
    async with asyncio.timeout(WAIT_S):
        head, _ = await connection.answer()
    assert "200 ok" in head
    connection.close()
    await ready_again(service)


async def test_idle_connection_moves_to_another_gateway(service: Served) -> None:
    connections = [await Connection(service).open() for _ in range(4)]
    for connection in connections:
        await connection.ask("/v1/completions", wanted(2))
        await connection.answer()
    for pid in (await asyncio.to_thread(gateways, service)).values():
        kill(pid)
    for connection in connections:
        await connection.ask("/v1/completions", wanted(2))
        async with asyncio.timeout(WAIT_S):
            head, body = await connection.answer()
        assert "200 ok" in head
        assert json.loads(body)["usage"]["completion_tokens"] == 2
        connection.close()
    await ready_again(service)


@pytest.mark.parametrize("delay_s", [0.0005, 0.001, 0.002])
async def test_requests_that_arrive_as_their_gateway_dies_are_answered(
    service: Served, delay_s: float
) -> None:
    """It may have read them; the keeper or the kernel has them all the same."""
    pids = await asyncio.to_thread(gateways, service)
    connections = [await Connection(service).open() for _ in range(16)]
    for connection in connections:
        await connection.ask("/v1/completions", wanted(2))
    time.sleep(delay_s)  # noqa: ASYNC251
    for pid in pids.values():
        kill(pid)
    for connection in connections:
        async with asyncio.timeout(WAIT_S):
            head, _ = await connection.answer()
        assert "200 ok" in head
        connection.close()
    await ready_again(service)


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 0.9, "seed": 5}])
async def test_whole_answer_of_a_killed_gateway_is_the_same(
    service: Served, more: dict[str, Any]
) -> None:
    body = wanted(48, **more)
    plain = await Connection(service).open()
    await plain.ask("/v1/completions", body)
    _, undisturbed = await plain.answer()
    plain.close()
    connections = [await Connection(service).open() for _ in range(4)]
    for connection in connections:
        await connection.ask("/v1/completions", body)
    await asyncio.sleep(0.05)
    for pid in (await asyncio.to_thread(gateways, service)).values():
        kill(pid)
    for connection in connections:
        async with asyncio.timeout(WAIT_S):
            head, found = await connection.answer()
        assert "200 ok" in head
        shown, other = json.loads(found), json.loads(undisturbed)
        assert without_chance(shown) == without_chance(other)
        connection.close()
    await ready_again(service)


async def test_pipelined_requests_are_answered_in_order(service: Served) -> None:
    connection = await Connection(service).open()
    counts = [30, 3, 20, 1]
    for count in counts:
        await connection.ask("/v1/completions", wanted(count))
    await asyncio.sleep(0.15)
    for pid in (await asyncio.to_thread(gateways, service)).values():
        kill(pid)
    for count in counts:
        async with asyncio.timeout(WAIT_S):
            head, body = await connection.answer()
        assert "200 ok" in head
        assert json.loads(body)["usage"]["completion_tokens"] == count
    connection.close()
    await ready_again(service)


async def test_client_without_chunks_gets_every_byte(service: Served) -> None:
    """HTTP/1.0: the answer ends with the connection."""

    async def read(*, is_killed: bool) -> str:
        connection = await Connection(service).open()
        content = json.dumps({**BODIES["sampled"][1], "stream": True})
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(content)}"
        connection.writer.write(f"{head}\r\n\r\n{content}".encode())
        found = await connection.reader.read(2000)
        if is_killed:
            for pid in (await asyncio.to_thread(gateways, service)).values():
                kill(pid)
        async with asyncio.timeout(WAIT_S):
            found += await connection.reader.read()
        connection.close()
        return found.partition(b"\r\n\r\n")[2].decode()

    undisturbed, found = await read(is_killed=False), await read(is_killed=True)
    first, second = shown(undisturbed.encode()), shown(found.encode())
    assert list(map(without_chance, second)) == list(map(without_chance, first))
    await ready_again(service)


async def test_connection_that_its_gateway_closes_ends_without_the_keeper(
    service: Served,
) -> None:
    """The keeper's duplicate does not hold the connection open."""
    connection = await Connection(service).open()
    await connection.ask("/v1/completions", wanted(2))
    await connection.answer()
    keeper = service.keeper()
    kill(keeper, signal.SIGSTOP)
    try:
        await connection.ask("/v1/completions", wanted(2), "Connection: close\r\n")
        async with asyncio.timeout(WAIT_S):
            await connection.answer()
            assert await connection.reader.read() == b""
        assert psutil.Process(keeper).status() == psutil.STATUS_STOPPED
    finally:
        kill(keeper, signal.SIGCONT)
    connection.close()
    await ready_again(service)


async def test_large_body_that_is_half_read_is_read_on(service: Served) -> None:
    """What the dead gateway had read of it is recorded."""
    body = wanted(3)
    body["metadata"] = {"x": "y" * 500}
    content = json.dumps(body).encode() + b" " * 4_000_000
    connection = await Connection(service).open()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}"
    connection.writer.write(f"{head}\r\n\r\n".encode() + content[:2_000_000])
    await asyncio.sleep(0.2)
    for pid in (await asyncio.to_thread(gateways, service)).values():
        kill(pid)
    connection.writer.write(content[2_000_000:])
    async with asyncio.timeout(WAIT_S):
        head, _ = await connection.answer()
    assert "200 ok" in head
    connection.close()
    await ready_again(service)


async def test_drained_gateway_hands_its_streams_over(service: Served) -> None:
    pids = await asyncio.to_thread(gateways, service)
    async with Streams(service) as streams:
        await streams.have(3)
        for name in pids:
            await asyncio.to_thread(drain, service, name)
    async with asyncio.timeout(WAIT_S):
        while pids.keys() & (await asyncio.to_thread(gateways, service)).keys():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert any("continued by another" in e.text for e in service.events("connections"))


async def test_update_of_the_gateways_hands_all_streams_over(service: Served) -> None:
    before = (await asyncio.to_thread(gateways, service)).keys()
    spec = {**service.spec, "gateway": {**service.spec["gateway"], "access_log": True}}
    async with Streams(service) as streams:
        await streams.have(3)
        text = yaml.safe_dump(spec, sort_keys=False)
        await asyncio.to_thread(service.update, text)
        async with asyncio.timeout(WAIT_S):
            while before & (await asyncio.to_thread(gateways, service)).keys():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    connection = await Connection(service).open()
    await connection.ask("/v1/completions", wanted(1))
    await connection.answer()
    connection.close()
    logs = list(service.state.rglob("gateway-*.log"))
    async with asyncio.timeout(WAIT_S):
        while not any("POST /v1/" in log.read_text() for log in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_gateways_are_lost_after_an_update_of_the_model(tmp_path: Path) -> None:
    """Streams that began with a version that is gone continue with its equal."""
    folder = save_decoder(tmp_path / "decoder", max_position_embeddings=1024)
    spec = spec_of(folder)
    spec["drain_s"] = 1.0
    spec["models"]["m"]["version"] = "1"
    spec["models"]["m"]["generation"]["kv_cache_memory_mb"] = 16
    with served(tmp_path, spec) as service:
        async with Streams(service, tokens=500) as streams:
            await streams.have(3)
            spec["models"]["m"]["version"] = "2"
            text = yaml.safe_dump(spec, sort_keys=False)
            await asyncio.to_thread(service.update, text)
            async with asyncio.timeout(WAIT_S):
                while "1" in await asyncio.to_thread(versions, service):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert not any(task.done() for task in streams.tasks)
            for pid in (await asyncio.to_thread(gateways, service)).values():
                kill(pid)


async def test_openais_client_notices_nothing(service: Served) -> None:
    """It does not retry, and its connections are used again."""
    async with client(service) as api:
        undisturbed = await Stream(api).end()
        for number in (signal.SIGKILL, signal.SIGSTOP):
            streams = [Stream(api) for _ in range(4)]
            await streams[0].has(5)
            kill(min((await asyncio.to_thread(gateways, service)).values()), number)
            async with asyncio.timeout(WAIT_S):
                for each in streams:
                    assert await each.end() == undisturbed
            await ready_again(service)


async def test_next_service_continues_the_streams_of_the_last_one(
    tmp_path: Path,
) -> None:
    """The keeper holds them meanwhile, even if it is paused for a while."""
    spec = spec_of(save_decoder(tmp_path / "decoder"))
    spec["gateway"]["handover_s"] = 120.0
    with served(tmp_path, spec) as service:
        async with Streams(service, tokens=200) as streams:
            await streams.have(3)
            idle = await Connection(service).open()
            await idle.ask("/v1/completions", wanted(2))
            await idle.answer()
            before = service.keeper()
            assert service.process is not None
            service.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0
            meanwhile = await Connection(service).open()
            await meanwhile.ask("/v1/completions", wanted(2))
            kill(before, signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            kill(before, signal.SIGCONT)
            url = service.url
            await asyncio.to_thread(service.start)
            assert (service.url, service.keeper()) == (url, before)
            await idle.ask("/v1/completions", wanted(2))
            for connection in (meanwhile, idle):
                async with asyncio.timeout(WAIT_S):
                    head, _ = await connection.answer()
                assert "200 ok" in head
                connection.close()
        await asyncio.to_thread(service.end)
        kill(service.keeper(), signal.SIGTERM)


async def test_keeper_waits_for_the_next_service_and_ends(tmp_path: Path) -> None:
    """The client whose request waits is told to retry."""
    spec = spec_of(save_decoder(tmp_path / "decoder"))
    spec["gateway"]["handover_s"] = 2.0
    with served(tmp_path, spec) as service:
        connection = await Connection(service).open()
        await connection.ask("/v1/completions", wanted(2))
        await connection.answer()
        assert service.process is not None
        service.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(service.process.wait, WAIT_S) == 0
        other = await Connection(service).open()
        await other.ask("/v1/completions", wanted(2))
        async with asyncio.timeout(WAIT_S):
            head, _ = await other.answer()
            assert ("503" in head, "retry-after" in head) == (True, True)
            assert await connection.reader.read() == b""
            while service.keeper():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        for each in (connection, other):
            each.close()
