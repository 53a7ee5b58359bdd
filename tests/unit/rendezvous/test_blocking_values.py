"""Values of a store for threads: time limits, lost stores, and closing from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import NoneType
from typing import Any, TypeVar

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
from multiworld.net.handshake_messages import Answer
from multiworld.rendezvous import blocking_values
from multiworld.rendezvous.blocking_values import BlockingValues
from multiworld.rendezvous.store_address import parse_store
from multiworld.rendezvous.store_messages import (
    AddAmount,
    CheckKeys,
    ClaimReceived,
    GetValues,
    RankTaken,
    Reply,
    Result,
    SetValue,
    ValueRequest,
)
from multiworld.rendezvous.store_server import StoreServer
from tests.ports import free_port
from tests.unit.inner_state import fileno, session_count
from tests.unit.rendezvous.sessions import (
    WELCOME,
    Impostor,
    answers,
    hangs_up,
    is_silent,
    raw,
    says,
)
from tests.unit.waiting import until

SECRET = Security(secret=b"a secret long enough to be one")
NONE = Security()
HANG_S = 20.0

R = TypeVar("R")


def connection(
    port: int, security: Security = NONE, timeout_s: float = 10
) -> BlockingValues:
    """Return a connection to a store on loopback, for use in a thread."""
    (address,) = parse_store(f"tcp://127.0.0.1:{port}").stores
    return BlockingValues(address, timeout_s, security)


async def values_at(
    port: int, security: Security = NONE, timeout_s: float = 10
) -> BlockingValues:
    """Connect in a thread, while the store runs on this loop."""
    return await asyncio.to_thread(connection, port, security, timeout_s)


async def ask(values: BlockingValues, request: ValueRequest, kind: type[R]) -> R:
    return await asyncio.to_thread(values.request, request, kind)


async def get(values: BlockingValues, key: str, deadline_s: float = 5) -> list[str]:
    return await ask(values, GetValues(0, (key,), deadline_s), list)


async def put(values: BlockingValues, key: str, value: str) -> None:
    await ask(values, SetValue(0, key, value), NoneType)


async def count(values: BlockingValues) -> int:
    return await ask(values, AddAmount(0, "n", 0), int)


@pytest.fixture
async def server() -> AsyncIterator[StoreServer]:
    server = await StoreServer.listen("127.0.0.1", 0)
    yield server
    await server.close()


async def test_values_of_two_connections_are_the_same(server: StoreServer) -> None:
    one, two = await values_at(server.port), await values_at(server.port)
    waiting = asyncio.create_task(get(two, "k", 10))
    await put(one, "k", "v")
    assert await waiting == ["v"]
    assert await ask(two, AddAmount(0, "n", 2), int) == 2
    assert await count(one) == 2
    for values in (one, two):
        values.close()
        values.close()
        assert fileno(values) == -1


async def test_requests_of_many_threads_are_answered_each_its_own(
    server: StoreServer,
) -> None:
    """One thread at a time uses the connection, so that no answer is mixed up."""
    values = await values_at(server.port)
    await asyncio.gather(*(put(values, f"k{n}", f"v{n}") for n in range(20)))
    found = await asyncio.gather(*(get(values, f"k{n}") for n in range(20)))
    assert found == [[f"v{n}"] for n in range(20)]
    values.close()


async def test_missing_value_is_a_time_out_and_the_connection_lives(
    server: StoreServer,
) -> None:
    """c10d asks again on the same connection."""
    values = await values_at(server.port)
    with pytest.raises(WorldTimeoutError, match="missing"):
        await get(values, "missing", 0.01)
    assert await ask(values, CheckKeys(0, ("missing",)), bool) is False
    values.close()


async def test_full_store_is_named_and_the_connection_lives(
    server: StoreServer,
) -> None:
    values = await values_at(server.port)
    for number in range(63):
        await put(values, f"k{number}", "v" * 2**20)
    with pytest.raises(StoreUnreachableError, match="holds the maximum of 67108864"):
        await put(values, "more", "v" * 2**20)
    assert await get(values, "k0") == ["v" * 2**20]
    values.close()


async def test_nobody_there_is_named() -> None:
    port = free_port()
    with pytest.raises(StoreUnreachableError) as missed:
        await values_at(port)
    assert missed.value.address == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("act", [hangs_up, is_silent], ids=lambda act: act.__name__)
async def test_store_that_does_not_shake_hands_is_unreachable(act: Any) -> None:
    """It holds up a thread for the time limit at most."""
    async with Impostor(act) as odd:
        with pytest.raises(StoreUnreachableError):
            await values_at(odd.port, timeout_s=0.1)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", StoreUnreachableError),
        (b"\x00\x00\x00\x02[]", StoreUnreachableError),
        (raw({"multiworld": "new"}), StoreUnreachableError),
        (frames.encode(Answer(multiworld=999)), ProtocolVersionError),
        (raw({}), ProtocolVersionError),
    ],
)
async def test_process_that_is_no_store_is_refused(
    data: bytes, kind: type[Exception]
) -> None:
    async with Impostor(says(data)) as web:
        with pytest.raises(kind):
            await values_at(web.port)


async def test_other_secret_is_named() -> None:
    server = await StoreServer.listen("127.0.0.1", 0, security=SECRET)
    for security in (NONE, Security(secret=b"another that is long enough, too")):
        with pytest.raises(WrongSecretError, match="MULTIWORLD_SECRET"):
            await values_at(server.port, security)
    values = await values_at(server.port, SECRET)
    assert await count(values) == 0
    values.close()
    await server.close()


async def test_values_travel_under_tls(tls: Tls) -> None:
    security = Security(tls=tls)
    server = await StoreServer.listen("127.0.0.1", 0, security=security)
    values = await values_at(server.port, security)
    await put(values, "k", "x" * 100_000)
    assert await get(values, "k") == ["x" * 100_000]
    values.close()
    with pytest.raises(StoreUnreachableError):
        await values_at(server.port)
    await server.close()


async def test_store_that_dies_wakes_the_thread_that_waits(server: StoreServer) -> None:
    """A thread inside c10d gets an error instead of a hang."""
    values = await values_at(server.port)
    waiting = asyncio.create_task(get(values, "k", 60))
    await until(lambda: session_count(server) == 1)
    await server.close()
    with pytest.raises(StoreUnreachableError):
        await waiting
    assert fileno(values) == -1


async def test_close_wakes_the_thread_that_waits() -> None:
    """A world that breaks releases the threads of its group."""
    async with Impostor(says(WELCOME)) as store:
        values = await values_at(store.port)
        waiting = asyncio.create_task(get(values, "k", 60))
        (sock,) = store.accepted
        sock.setblocking(False)
        heard = b""
        async with asyncio.timeout(HANG_S):
            while b"GetValues" not in heard:
                heard += await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
            values.close()
            with pytest.raises(StoreUnreachableError):
                await waiting


async def test_silent_store_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late answer must not pass for that of the next request."""
    monkeypatch.setattr(blocking_values, "SLACK_S", 0.05)
    async with Impostor(says(WELCOME)) as stopped:
        values = await values_at(stopped.port)
        with pytest.raises(StoreUnreachableError):
            await count(values)
        assert fileno(values) == -1


async def test_request_after_close_is_an_error_of_ours(server: StoreServer) -> None:
    """A thread of c10d may ask once more after its world has broken."""
    values = await values_at(server.port)
    values.close()
    with pytest.raises(StoreUnreachableError):
        await count(values)


async def test_wrong_request_ends_the_connection(server: StoreServer) -> None:
    values = await values_at(server.port)
    with pytest.raises(StoreUnreachableError):
        await get(values, "k", -1.0)
    assert server.refused == {"malformed": 1}
    assert fileno(values) == -1


@pytest.mark.parametrize(
    "reply",
    [
        raw({}),
        raw(b"\xff"),
        raw({"op": "Reply", "request": 1}),
        raw({"op": "Reply", "request": 1, "outcome": {"op": "Result", "value": {}}}),
        frames.encode(ClaimReceived(1)),
        frames.encode(Reply(1, RankTaken())),
        frames.encode(Reply(1, Result("many"))),
        frames.encode(Reply(1, Result(None))),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=lambda reply: repr(reply[4:44]),
)
async def test_answer_that_is_no_count_is_an_error_of_ours(reply: bytes) -> None:
    """c10d gets nothing but a result of the expected type."""
    async with Impostor(answers(reply)) as odd:
        values = await values_at(odd.port)
        with pytest.raises(StoreUnreachableError):
            await count(values)
        values.close()


async def test_request_too_long_for_a_frame_is_an_error_of_ours(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c10d may be given a value of any length."""
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10_000)
    values = await values_at(server.port)
    try:
        with pytest.raises(StoreUnreachableError):
            await put(values, "k", "x" * 20_000)
    finally:
        values.close()
