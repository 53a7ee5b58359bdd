"""Values of a store for threads: time limits, lost stores, and closing from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from multiworld import (
    ProtocolVersionError,
    Security,
    StoreUnreachableError,
    Tls,
    WorldTimeoutError,
    WrongSecretError,
)
from multiworld.net import frames
from multiworld.rendezvous import blocking_values
from multiworld.rendezvous.blocking_values import BlockingValues
from multiworld.rendezvous.store_address import parse_store
from multiworld.rendezvous.store_server import StoreServer
from tests.ports import free_port
from tests.unit.rendezvous.sessions import Impostor, hangs_up, is_silent, says
from tests.unit.waiting import until

SECRET = Security(secret=b"a secret long enough to be one")
NONE = Security()


def connection(
    port: int, security: Security = NONE, timeout_s: float = 10
) -> BlockingValues:
    """Return a connection to a store on loopback; for a thread."""
    (address,) = parse_store(f"tcp://127.0.0.1:{port}").stores
    return BlockingValues(address, timeout_s, security)


async def values_at(
    port: int, security: Security = NONE, timeout_s: float = 10
) -> BlockingValues:
    """Connect in a thread, while the store runs on this loop."""
    return await asyncio.to_thread(connection, port, security, timeout_s)


async def ask(values: BlockingValues, op: str, **fields: Any) -> Any:
    """Make a request in a thread."""
    return await asyncio.to_thread(values.request, op, **fields)


@pytest.fixture
async def server() -> AsyncIterator[StoreServer]:
    """Return a store without a secret."""
    server = await StoreServer.listen("127.0.0.1", 0)
    yield server
    await server.close()


async def test_values_of_two_connections_are_the_same(server: StoreServer) -> None:
    """A value that one thread sets, another one gets."""
    one, two = await values_at(server.port), await values_at(server.port)
    waiting = asyncio.create_task(ask(two, "get", keys=["k"], deadline_s=10))
    await ask(one, "set", key="k", value="v")
    assert await waiting == ["v"]
    assert await ask(two, "add", key="n", amount=2) == 2
    assert await ask(one, "count") == 2
    for values in (one, two):
        values.close()
        values.close()
        assert values.fileno() == -1


async def test_requests_of_many_threads_are_answered_each_its_own(
    server: StoreServer,
) -> None:
    """One at a time uses the connection, so that no answer is mixed up."""
    values = await values_at(server.port)
    await asyncio.gather(
        *(ask(values, "set", key=f"k{n}", value=f"v{n}") for n in range(20))
    )
    found = await asyncio.gather(
        *(ask(values, "get", keys=[f"k{n}"], deadline_s=5) for n in range(20))
    )
    assert found == [[f"v{n}"] for n in range(20)]
    values.close()


async def test_missing_value_is_a_time_out_and_the_connection_lives(
    server: StoreServer,
) -> None:
    """c10d asks again on the same connection."""
    values = await values_at(server.port)
    with pytest.raises(WorldTimeoutError, match="missing"):
        await ask(values, "get", keys=["missing"], deadline_s=0.01)
    assert await ask(values, "check", keys=["missing"]) is False
    values.close()


async def test_nobody_there_is_named() -> None:
    """The error carries the address."""
    port = free_port()
    with pytest.raises(StoreUnreachableError) as missed:
        await values_at(port)
    assert missed.value.address == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("act", [hangs_up, is_silent], ids=lambda act: act.__name__)
async def test_store_that_does_not_shake_hands_is_unreachable(act: Any) -> None:
    """A thread is held up for the time limit at most."""
    async with Impostor(act) as odd:
        with pytest.raises(StoreUnreachableError):
            await values_at(odd.port, timeout_s=0.1)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", StoreUnreachableError),
        (b"\x00\x00\x00\x02[]", StoreUnreachableError),
        (frames.encode({"multiworld": 999}), ProtocolVersionError),
        (frames.encode({}), ProtocolVersionError),
    ],
)
async def test_process_that_is_no_store_is_refused(
    data: bytes, kind: type[Exception]
) -> None:
    """Garbage never passes for a handshake."""
    async with Impostor(says(data)) as web:
        with pytest.raises(kind):
            await values_at(web.port)


async def test_other_secret_is_named() -> None:
    """Both sides must hold the same one."""
    server = await StoreServer.listen("127.0.0.1", 0, security=SECRET)
    for security in (NONE, Security(secret=b"another that is long enough, too")):
        with pytest.raises(WrongSecretError, match="MULTIWORLD_SECRET"):
            await values_at(server.port, security)
    values = await values_at(server.port, SECRET)
    assert await ask(values, "count") == 0
    values.close()
    await server.close()


async def test_values_travel_under_tls(tls: Tls) -> None:
    """A member without TLS is refused by the store."""
    security = Security(tls=tls)
    server = await StoreServer.listen("127.0.0.1", 0, security=security)
    values = await values_at(server.port, security)
    await ask(values, "set", key="k", value="x" * 100_000)
    assert await ask(values, "get", keys=["k"], deadline_s=5) == ["x" * 100_000]
    values.close()
    with pytest.raises(StoreUnreachableError):
        await values_at(server.port)
    await server.close()


async def test_store_that_dies_wakes_the_thread_that_waits(server: StoreServer) -> None:
    """A thread inside c10d gets an error instead of a hang."""
    values = await values_at(server.port)
    waiting = asyncio.create_task(ask(values, "get", keys=["k"], deadline_s=60))
    await until(lambda: server.session_count == 1)
    await server.close()
    with pytest.raises(StoreUnreachableError):
        await waiting
    assert values.fileno() == -1


async def test_close_wakes_the_thread_that_waits(server: StoreServer) -> None:
    """A world that breaks releases the threads of its group."""
    values = await values_at(server.port)
    waiting = asyncio.create_task(ask(values, "get", keys=["k"], deadline_s=60))
    await until(lambda: values._lock.locked())
    values.close()
    with pytest.raises(StoreUnreachableError):
        await waiting


async def test_silent_store_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late answer must not pass for that of the next request."""
    monkeypatch.setattr(blocking_values, "SLACK_S", 0.05)
    hello = frames.encode({"multiworld": frames.PROTOCOL_VERSION, "ok": True})
    async with Impostor(says(hello)) as stopped:
        values = await values_at(stopped.port)
        with pytest.raises(StoreUnreachableError):
            await ask(values, "count")
        assert values.fileno() == -1


@pytest.mark.xfail(
    strict=True, reason="OSError (bad file descriptor) instead of StoreUnreachableError"
)
async def test_request_after_close_is_an_error_of_ours(server: StoreServer) -> None:
    """A thread of c10d may ask once more after its world has broken."""
    values = await values_at(server.port)
    values.close()
    with pytest.raises(StoreUnreachableError):
        await ask(values, "count")


async def test_wrong_request_ends_the_connection(server: StoreServer) -> None:
    """The store closes it, and the thread hears of that."""
    values = await values_at(server.port)
    with pytest.raises(StoreUnreachableError):
        await ask(values, "no such operation")
    assert server.refused == {"malformed": 1}
