"""The store on a port: sessions that die, lag behind, or send garbage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from multiworld import Security
from multiworld.net import forks, frames
from multiworld.net.handshake import dialing
from multiworld.net.listener import read_frame
from multiworld.net.streams import write_all
from multiworld.net.tcp import tune
from multiworld.rendezvous import store_messages, store_server
from multiworld.rendezvous.store_messages import (
    Admitted,
    CheckKeys,
    ClaimReceived,
    GetValues,
    Reply,
    Result,
    SetValue,
    StoreHello,
    StoreMessage,
    VersionDiffers,
)
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import no_leaks
from tests.unit.inner_state import session_count, waiting_count
from tests.unit.rendezvous.sessions import claim_of, raw, values_of
from tests.unit.waiting import turns, until

SECRET = Security(secret=b"a secret long enough to be one")


class Client:
    """A member's connection, byte by byte if necessary."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @classmethod
    async def of(
        cls,
        server: StoreServer,
        security: Security = SECRET,
        version: int = frames.PROTOCOL_VERSION,
    ) -> Client:
        sock = socket.socket()
        tune(sock)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        client = cls(sock)
        steps = dialing(StoreHello(world="w"), security)
        try:
            hello = json.loads(next(steps)[4:])
            frame = raw({**hello, "multiworld": version})
            while True:
                await client.send(frame)
                frame = steps.send(await client.receive())
        except StopIteration:
            return client
        except BaseException:
            sock.close()
            raise

    async def send(self, data: bytes) -> None:
        await write_all(self.sock, data)

    async def receive(self) -> bytes:
        async with asyncio.timeout(20):
            return await read_frame(self.sock, frames.MAX_FRAME_BYTES)

    async def say(self, message: msgspec.Struct) -> None:
        await self.send(frames.encode(message))

    async def hear(self) -> StoreMessage:
        message: StoreMessage
        message = frames.decode_body(await self.receive(), store_messages.replies)
        return message

    async def hear_end(self) -> None:
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionResetError):
                while await self.receive():
                    pass

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
async def server() -> AsyncIterator[StoreServer]:
    async with no_leaks():
        server = await StoreServer.listen("127.0.0.1", 0, security=SECRET)
        yield server
        await server.close()


async def test_members_meet_over_two_connections(server: StoreServer) -> None:
    clients = [await Client.of(server) for _ in range(2)]
    for rank, client in enumerate(clients):
        await client.say(claim_of(1, rank, 2, f"m{rank}"))
        assert await client.hear() == ClaimReceived(1)
    answers = [await client.hear() for client in clients]
    assert answers[0] == answers[1]
    assert isinstance(answers[0], Reply)
    assert isinstance(answers[0].outcome, Admitted)
    assert session_count(server) == 2
    for client in clients:
        client.close()
    await until(lambda: session_count(server) == 0)


async def test_member_that_dies_gives_up_its_claim(server: StoreServer) -> None:
    """The end of its connection is enough."""
    client = await Client.of(server)
    await client.say(claim_of(1, 0, 2))
    await until(lambda: waiting_count(server) == 1)
    client.close()
    await until(lambda: waiting_count(server) == 0)
    assert server.refused == {}


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        raw({}),
        raw([]),
        raw(b"\xff"),
        raw({"op": "no such", "request": 1}),
        raw({"op": "Claim"}),
        raw(values_of(claim_of(1, 0, 2), member="text")),
        raw(values_of(claim_of(1, 0, 2), rank=-1)),
        raw(values_of(claim_of(1, 0, 2), place=[0, 5000])),
        raw({"op": "GetValues", "request": 1, "keys": None, "deadline_s": 1}),
        raw(b'{"op":"GetValues","request":1,"keys":["k"],"deadline_s":NaN}'),
        raw(b'{"op":"GetValues","request":1,"keys":["k"],"deadline_s":1e999}'),
        raw(b"[" * 100_000),
    ],
    ids=lambda garbage: repr(garbage[4:44]),
)
async def test_garbage_costs_only_the_session_it_came_from(
    server: StoreServer, garbage: bytes
) -> None:
    good, bad = await Client.of(server), await Client.of(server)
    await bad.say(claim_of(1, 0, 2))
    await bad.send(garbage)
    await bad.hear_end()
    assert server.refused == {"malformed": 1}
    await until(lambda: session_count(server) == 1)
    assert waiting_count(server) == 0
    await good.say(CheckKeys(5, ("k",)))
    assert await good.hear() == Reply(5, Result(False))
    for client in (good, bad):
        client.close()


async def test_member_that_does_not_read_is_closed(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped member must not fill the store's memory."""
    monkeypatch.setattr(store_server, "MAX_BACKLOG_BYTES", 1 << 20)
    lazy, good = await Client.of(server), await Client.of(server)
    await lazy.say(SetValue(0, "k", "x" * 500_000))
    for request in range(1, 60):
        await lazy.say(GetValues(request, ("k",), 1))
        await turns(3)
        if session_count(server) == 1:
            break
    assert session_count(server) == 1
    await good.say(CheckKeys(1, ("k",)))
    assert await good.hear() == Reply(1, Result(True))
    for client in (lazy, good):
        client.close()


async def test_answer_too_long_for_a_frame_costs_only_who_asked(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member whose set completed the other's wait has done nothing wrong."""
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10_000)
    greedy, good = await Client.of(server), await Client.of(server)
    try:
        await greedy.say(GetValues(1, ("a", "b"), 9))
        for number, key in enumerate(("a", "b")):
            await good.say(SetValue(number, key, "x" * 6_000))
            assert await good.hear() == Reply(number, Result(None))
        await greedy.hear_end()
        await good.say(CheckKeys(9, ("a", "b")))
        assert await good.hear() == Reply(9, Result(True))
        assert session_count(server) == 1
    finally:
        for client in (greedy, good):
            client.close()


async def test_peer_without_the_secret_opens_no_session(
    server: StoreServer,
) -> None:
    with pytest.raises(ConnectionRefusedError):
        await Client.of(server, Security())
    assert (session_count(server), server.refused) == (0, {"secret": 1})


async def test_other_release_is_reported_to_waiting_members() -> None:
    """Without a secret, they learn at once why the world cannot form."""
    server = await StoreServer.listen("127.0.0.1", 0)
    client = await Client.of(server, Security())
    await client.say(claim_of(1, 0, 2))
    await client.hear()
    with pytest.raises(ConnectionRefusedError):
        await Client.of(server, Security(), version=999)
    detail = "a member at 127.0.0.1 speaks version 999"
    assert await client.hear() == Reply(1, VersionDiffers(999, detail))
    assert waiting_count(server) == 0
    client.close()
    await server.close()


async def test_untrusted_peer_cannot_disturb_a_world_behind_a_secret(
    server: StoreServer,
) -> None:
    """Where there is a secret, a version mismatch is reported to no member."""
    client = await Client.of(server)
    await client.say(claim_of(1, 0, 2))
    await until(lambda: waiting_count(server) == 1)
    with pytest.raises(ConnectionRefusedError):
        await Client.of(server, Security(), version=999)
    assert waiting_count(server) == 1
    client.close()


async def test_close_ends_sessions_and_closes_every_descriptor(
    server: StoreServer,
) -> None:
    clients = [await Client.of(server) for _ in range(3)]
    found = forks.filenos()
    assert len(found) == 4
    server.close_nowait()
    for client in clients:
        await client.hear_end()
        client.close()
    await server.close()
    assert forks.filenos() == []
    for fd in found:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
    again = await StoreServer.listen("127.0.0.1", server.port)
    with pytest.raises(OSError, match="in use"):
        await StoreServer.listen("127.0.0.1", server.port)
    await again.close()


async def test_address_of_another_host_is_an_os_error() -> None:
    """The joiner concludes from it that the store is elsewhere."""
    with pytest.raises(OSError, match="assign"):
        await StoreServer.listen("192.0.2.1", 0)
