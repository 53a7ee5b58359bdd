"""Faults at every event of a stream, under many streams, and with slow clients."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.serve.harness import WAIT_S, Served, served
from tests.serve.test_keeper import (
    Connection,
    Streams,
    gateways,
    keeper_has,
    kill,
    ready_again,
    shown,
    wanted,
    without_chance,
)
from tests.serve.texts import spec_of
from tests.tiny_decoder import save_decoder

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

TOKENS = 6
"""Tokens of a stream that is hit at each of its events."""

SMALL = 4096
"""Bytes of a slow client's receive buffer."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_of(save_decoder(tmp_path_factory.mktemp("decoder")))
    spec["gateway"]["replicas"] = 2
    with served(tmp_path_factory.mktemp("hit"), spec) as made:
        yield made


def holder(service: Served) -> int:
    """Return the gateway that has a request; any, if the request has ended."""
    found = service.status(reports=True)
    pids = gateways(service)
    for name, pid in pids.items():
        report = found.gateway_report(name)
        if report is not None and report.in_flight:
            return pid
    return min(pids.values())


def keeper(service: Served) -> int:
    """Return the keeper, once there is one."""
    while not (found := service.keeper()):
        time.sleep(0.05)
    return found


async def events_of(connection: Connection) -> list[bytes]:
    async with asyncio.timeout(WAIT_S):
        head = await connection.reader.readuntil(b"\r\n\r\n")
        assert b" 200 OK" in head
        return [chunk async for chunk in connection.chunks()]


BODY = wanted(TOKENS, stream=True, temperature=1.0, seed=7)
ANSWER = "/v1/completions"


@pytest.mark.parametrize("fault", ["kill", "stop", "keeper"])
async def test_stream_is_whole_wherever_it_is_hit(service: Served, fault: str) -> None:
    """Before its head, after each of its chunks, and after its end."""
    connection = await Connection(service).open()
    await connection.ask(ANSWER, BODY)
    undisturbed = shown(b"".join(await events_of(connection)))
    for at in range(-1, TOKENS + 3):
        await connection.ask(ANSWER, BODY)
        found: list[bytes] = []
        async with asyncio.timeout(WAIT_S):
            if at >= 0:
                await connection.reader.readuntil(b"\r\n\r\n")
                chunks = connection.chunks()
                while len(found) < at:
                    chunk = await anext(chunks, None)
                    if chunk is None:
                        break
                    found.append(chunk)
        if fault == "keeper":
            kill(await asyncio.to_thread(keeper, service))
        else:
            number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
            kill(await asyncio.to_thread(holder, service), number)
        if at < 0:
            found = await events_of(connection)
        else:
            async with asyncio.timeout(WAIT_S):
                found += [chunk async for chunk in chunks]
        events = shown(b"".join(found))
        assert list(map(without_chance, events)) == list(
            map(without_chance, undisturbed)
        ), at
        await ready_again(service)
    connection.close()


async def test_many_streams_outlive_several_gateways(service: Served) -> None:
    async with Streams(service, count=64, tokens=60) as streams:
        for round_ in range(4):
            await streams.have(3 + 8 * round_)
            await keeper_has(service, streams.count)
            number = signal.SIGSTOP if round_ % 2 else signal.SIGKILL
            pids = await asyncio.to_thread(gateways, service)
            kill(min(pids.values()), number)
            await ready_again(service)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_client_that_reads_slowly_gets_every_byte(
    service: Served, number: signal.Signals
) -> None:
    """What it has not taken is in the kernel, at the gateway, and at the keeper."""
    body = wanted(150, stream=True, n=8, logprobs=5, temperature=1.0, seed=3)

    async def read(*, is_hit: bool) -> bytes:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        port = int(service.url.rpartition(":")[2])
        await loop.sock_connect(sock, ("127.0.0.1", port))
        connection = Connection(service)
        opened = await asyncio.open_connection(sock=sock, limit=SMALL)
        connection.reader, connection.writer = opened
        await connection.ask(ANSWER, body)
        if is_hit:
            await asyncio.sleep(1.0)  # its buffers are full by then
            kill(await asyncio.to_thread(holder, service), number)
            await asyncio.sleep(1.0)
        found = b"".join(await events_of(connection))
        connection.close()
        return found

    def by_choice(found: bytes) -> dict[int, list[object]]:
        """Return the events of each choice: choices come in any order."""
        events: dict[int, list[object]] = {}
        for event in map(without_chance, shown(found)):
            for choice in event["choices"]:
                events.setdefault(choice["index"], []).append(choice)
        return events

    undisturbed = by_choice(await read(is_hit=False))
    assert by_choice(await read(is_hit=True)) == undisturbed
    assert len(undisturbed) == 8
    await ready_again(service)
