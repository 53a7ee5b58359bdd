"""The load generator: requests that leave on time, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from multiworld.serve.load import generator
from multiworld.serve.load.generator import Load, Target, embeddings, inference
from multiworld.serve.load.summary import Sample, summarise
from tests.ports import free_port
from tests.unit.waiting import until


class Server:
    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.status, self.body = 200, b'{"ok": true}'
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.read())
        await self.is_open.wait()
        return web.Response(status=self.status, body=self.body)

    def target(self, *bodies: bytes) -> Target:
        return Target(self.url, list(bodies or (b"{}",)), {})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.url = f"http://127.0.0.1:{port}/x"
    yield server
    server.is_open.set()
    await runner.cleanup()


AT_ONCE = [0.0] * 5
"""Due times of five requests that leave together."""


def test_targets_are_the_services_routes() -> None:
    target = embeddings("http://h:1/", "m", ["a", "b"])
    assert target.url == "http://h:1/v1/embeddings"
    assert orjson.loads(target.bodies[1]) == {"model": "m", "input": "b"}
    target = inference("http://h:1", "m", [b"{}"])
    assert target.url == "http://h:1/v2/models/m/infer"
    assert target.headers == {"Content-Type": "application/json"}


async def test_requests_take_the_bodies_in_turn(server: Server) -> None:
    numbers: list[int] = []

    def check(number: int, answer: Any) -> bool:
        numbers.append(number)
        return bool(answer["ok"]) and number != 3

    load = Load(server.target(b"a", b"b"), 1.0, check, due=AT_ONCE)
    samples = await load.run()
    assert sorted(server.asked) == [b"a", b"a", b"a", b"b", b"b"]
    assert sorted(numbers) == list(range(5))
    found = summarise(samples)
    assert (found.sent, found.answered, found.wrong) == (5, 5, 1)
    assert load.sent == 5


async def test_steady_rate_ends_with_its_time(server: Server) -> None:
    load = Load(server.target(), 100.0)
    samples = await load.run(0.05)
    assert sorted(round(s.due_s, 6) for s in samples) == [0.0, 0.01, 0.02, 0.03, 0.04]
    assert all(s.latency_s >= 0 for s in samples)


async def test_slow_service_does_not_delay_the_next_request(server: Server) -> None:
    """An open loop keeps its schedule; the wait shows in the latency."""
    server.is_open.clear()
    load = Load(server.target(), 1.0, due=[0.0, 0.01, 0.02])
    running = asyncio.create_task(load.run())
    await until(lambda: len(server.asked) == 3)
    assert load.samples == []
    server.is_open.set()
    samples = await running
    assert len(samples) == 3
    assert max(s.latency_s for s in samples) >= 0.02


async def test_refused_request_is_a_sample_with_its_text(server: Server) -> None:
    server.status, server.body = 503, b"too busy \xff" + b"x" * 500
    load = Load(server.target(), 1.0, lambda number, answer: False, due=[0.0])
    (sample,) = await load.run()
    assert (sample.status, sample.is_right) == (503, None)
    assert sample.error.startswith("too busy")
    assert len(sample.error) <= 200
    assert not sample.is_answered


async def test_service_that_is_gone_fails_requests_not_the_run() -> None:
    target = Target(f"http://127.0.0.1:{free_port()}/x", [b"{}"], {})
    samples = await Load(target, 1.0, due=AT_ONCE).run()
    assert [s.status for s in samples] == [0] * 5
    assert all("Connect" in s.error for s in samples)


async def test_silent_service_fails_requests_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=0.05)
    monkeypatch.setattr(generator, "TIMEOUT", timeout)
    server.is_open.clear()
    (sample,) = await Load(server.target(), 1.0, due=[0.0]).run()
    assert sample.status == 0
    assert "Timeout" in sample.error


async def test_ended_run_waits_for_its_answers(server: Server) -> None:
    server.is_open.clear()
    load = Load(server.target(), 1000.0)
    running = asyncio.create_task(load.run())
    await until(lambda: server.asked)
    load.end()
    server.is_open.set()
    samples = await running
    assert len(samples) == load.sent >= 1


async def test_cancelled_run_counts_only_what_was_answered(server: Server) -> None:
    server.is_open.clear()
    load = Load(server.target(), 1.0, due=[0.0, 0.0, 1000.0])
    running = asyncio.create_task(load.run())
    await until(lambda: len(server.asked) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert load.samples == []
    assert load.sent == 2


async def test_offset_moves_the_times_not_the_latencies(server: Server) -> None:
    """Loads that start at different times share one clock."""
    load = Load(server.target(), 1.0, due=[0.0])
    load.offset_s = 100.0
    (sample,) = await load.run()
    assert sample.due_s == 100.0
    assert sample.latency_s < 60


async def test_answer_that_the_check_cannot_read_is_wrong(server: Server) -> None:
    """A check may expect a field that is not there."""
    server.body = b"[]"
    load = Load(server.target(), 1.0, lambda _, answer: answer["data"] == 1, due=[0.0])
    (sample,) = await load.run()
    assert sample.is_right is False


async def test_answer_that_is_not_json_is_wrong(server: Server) -> None:
    """A proxy's page with status 200 is not an answer of the model."""
    server.body = b"<html>"
    load = Load(server.target(), 1.0, lambda *_: True, due=[0.0])
    found = summarise(await load.run())
    assert found.wrong + found.failed == 1


@pytest.mark.parametrize(
    ("end", "is_cut"),
    [
        (b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', False),
        (b'{"choices":[]}', True),
        (b'{"error":{"message":"its stage is lost"}}', True),
    ],
)
async def test_streams_are_timed_and_those_without_an_end_are_cut(
    server: Server, end: bytes, is_cut: bool
) -> None:
    """A cut one is no answer, although its status is 200."""
    parts = b"".join(
        b'data: {"choices":[{"delta":{"%s":"x"},"finish_reason":null}]}\n\n' % name
        for name in (b"reasoning", b"content", b"content")
    )
    server.body = parts + b": alive\n\ndata: " + end + b"\n\ndata: [DONE]\n\n"
    target = Target(server.url, [b"{}"], {}, is_stream=True)
    samples = await Load(target, 1.0, due=[0.0, 0.0]).run()
    assert [len(sample.times) for sample in samples] == [3, 3]
    found = summarise(samples)
    assert (found.cut, found.answered) == ((2, 0) if is_cut else (0, 2))
    assert found.first_p50_s is not None
    assert found.gap_max_s is not None


def test_times_of_streams_are_those_of_all_of_them() -> None:
    samples = [
        Sample(0.0, 1.0, 200, times=(0.25, 0.5, 1.0)),
        Sample(0.0, 2.0, 200, times=(0.75, 2.0)),
        Sample(0.0, 1.0, 500),
    ]
    found = summarise(samples)
    assert (found.first_p50_s, found.first_p99_s) == (0.25, 0.75)
    assert (found.gap_p50_s, found.gap_p99_s, found.gap_max_s) == (0.5, 1.25, 1.25)
    assert summarise([]).first_p50_s is None


async def test_answer_that_is_cut_is_not_counted_as_answered() -> None:
    """Its status has arrived; the rest does not come."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        load = Load(
            embeddings(f"http://127.0.0.1:{port}", "m", ["a"]), 1.0, due=AT_ONCE
        )
        found = summarise(await load.run())
    assert (found.answered, found.failed, found.cut) == (0, 5, 5)
    assert load.answered == 0
