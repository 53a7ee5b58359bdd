"""A manager's listener and the dialing of others, by both kinds of socket."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from multiworld import Security, Tls
from multiworld.liveness import endpoint as endpoint_module
from multiworld.liveness.endpoint import Endpoint, dial, reach
from multiworld.liveness.manager_messages import (
    HeartbeatHello,
    LaneHello,
    LinkHello,
    ManagerHello,
)
from multiworld.net import forks, frames
from multiworld.net.handshake import HandshakeError
from multiworld.net.handshake_messages import Answer, Hello
from multiworld.net.streams import Stream, TlsStream
from multiworld.rendezvous.membership import Address
from multiworld.testing import no_leaks
from tests.ports import free_port
from tests.unit.rendezvous.sessions import Impostor, hangs_up, is_silent, says
from tests.unit.waiting import until
from tests.wire import frame_of

NONE = Security()
SECRET = Security(secret=b"a secret long enough to be one")
OTHER = Security(secret=b"another that is long enough, too")
HELLO = LinkHello(uid="a", to_uid="b", host="h0", to_host="h1", seal="00")
BEAT = HeartbeatHello(uid="a", to_uid="b", host="h0", to_host="h1", number=1)
LANE = LaneHello(to_uid="x", nonce=1, rank=0, channel="p2p")


class Owner:
    """Owner that takes every connection but lanes."""

    hellos = ManagerHello

    def __init__(self) -> None:
        self.taken: list[tuple[Stream, Hello]] = []

    def security_for(self, hello: Hello) -> Security | None:
        return NONE if isinstance(hello, HeartbeatHello) else None

    def refusal(self, hello: Hello) -> str | None:
        return "no room" if isinstance(hello, LaneHello) else None

    def take(self, stream: Stream, hello: Hello) -> None:
        self.taken.append((stream, hello))

    def turned_away(self, hello: Hello, error: HandshakeError, where: object) -> None:
        pass


class Bench:
    def __init__(self, security: Security) -> None:
        self.owner = Owner()
        self.endpoint = Endpoint("127.0.0.1", self.owner, security)
        self.near = self.endpoint.address
        self.far = elsewhere(self.near)

    async def free(self) -> None:
        await self.endpoint.close()
        for stream, _ in self.owner.taken:
            stream.close()


def elsewhere(address: Address) -> Address:
    """Return the address as another host sees it: TCP only."""
    return dataclasses.replace(address, boot="another", unix="")


def at(port: int) -> Address:
    return Address(host="127.0.0.1", port=port, unix="", boot="another", netns="1")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with no_leaks():
        bench = Bench(SECRET)
        yield bench
        await bench.free()


async def test_own_host_is_dialed_over_a_unix_socket(bench: Bench) -> None:
    stream = await dial(bench.near, HELLO, SECRET)
    await until(lambda: bench.owner.taken)
    assert stream.family == socket.AF_UNIX
    stream.close()


async def test_other_host_is_dialed_over_tcp(bench: Bench) -> None:
    stream = await dial(bench.far, HELLO, SECRET)
    await until(lambda: bench.owner.taken)
    assert stream.family == socket.AF_INET
    stream.close()


@pytest.mark.parametrize("security", [NONE, OTHER])
async def test_other_secret_is_refused_by_name(
    bench: Bench, security: Security
) -> None:
    with pytest.raises(HandshakeError) as refused:
        await dial(bench.near, HELLO, security)
    assert refused.value.kind == "secret"
    assert bench.endpoint.refused["secret"] == 1


async def test_unwanted_connection_learns_the_reason(bench: Bench) -> None:
    with pytest.raises(HandshakeError, match="no room"):
        await dial(bench.near, LANE, SECRET)


async def test_nobody_there_is_an_os_error() -> None:
    async with no_leaks():
        with pytest.raises(ConnectionRefusedError):
            await dial(at(free_port()), HELLO, NONE)
        bench = Bench(NONE)
        await bench.free()
        with pytest.raises(ConnectionRefusedError):
            await dial(bench.near, HELLO, NONE)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "malformed"),
        (b"\0\0\0\2[]", "malformed"),
        (frame_of({"multiworld": "999", "ok": True}), "malformed"),
        (frame_of({"multiworld": frames.PROTOCOL_VERSION, "ok": 1}), "malformed"),
        (frame_of({"multiworld": 999, "ok": True}), "version"),
        (frame_of({"ok": True}), "version"),
        (frame_of({}), "version"),
        (frames.encode(Answer(multiworld=frames.PROTOCOL_VERSION)), "refused"),
    ],
)
async def test_foreign_process_at_the_address_is_distinguished_from_a_manager(
    data: bytes, kind: str
) -> None:
    """Another process may have taken the port of a manager that died."""
    async with Impostor(says(data)) as web:
        with pytest.raises(HandshakeError) as refused:
            await dial(at(web.port), HELLO, NONE)
    assert refused.value.kind == kind
    assert forks.filenos() == []


async def test_cancelled_dial_closes_its_connection() -> None:
    """While the handshake continues, a forked child knows the descriptor."""
    async with Impostor(is_silent) as stopped:
        dialing = asyncio.create_task(dial(at(stopped.port), HELLO, NONE))
        await until(lambda: stopped.accepted)
        (fd,) = forks.filenos()
        dialing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialing
        assert forks.filenos() == []
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)


async def test_descriptor_of_a_dial_under_tls_is_known(tls: Tls) -> None:
    """A forked child must close it, too, or it hides its parent's death."""
    async with Impostor(is_silent) as stopped:
        security = Security(tls=tls)
        dialing = asyncio.create_task(dial(at(stopped.port), HELLO, security))
        await until(lambda: stopped.accepted)
        for _ in range(20):
            await asyncio.sleep(0)
        known = forks.filenos()
        dialing.cancel()
        await asyncio.gather(dialing, return_exceptions=True)
        assert len(known) == 1


async def test_overloaded_listener_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may close the oldest handshakes; the error of the last attempt counts."""
    monkeypatch.setattr(endpoint_module, "CROWDED_S", (0.0, 0.0, 0.0))
    async with Impostor(hangs_up) as crowded:
        with pytest.raises(ConnectionResetError):
            await reach(at(crowded.port), HELLO, NONE)
        assert len(crowded.accepted) == 4


async def test_listener_that_is_overloaded_as_it_hears_the_proof_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a secret, the dialer writes again after the first message."""
    monkeypatch.setattr(endpoint_module, "CROWDED_S", (0.0, 0.0))
    left = [BrokenPipeError(), ConnectionResetError()]
    stream = object()

    async def dialed(*given: Any) -> Any:
        if left:
            raise left.pop()
        return stream

    monkeypatch.setattr(endpoint_module, "dial", dialed)
    assert await reach(at(1), HELLO, SECRET) is stream


async def test_refused_connection_is_not_tried_again(bench: Bench) -> None:
    """Only a reset is a sign of overload."""
    with pytest.raises(HandshakeError):
        await reach(bench.near, HELLO, OTHER)
    assert sum(bench.endpoint.refused.values()) == 1


async def test_only_heartbeats_go_without_tls(tls: Tls) -> None:
    """Each of their frames carries a proof of its own."""
    bench = Bench(Security(tls=tls))
    for hello in (HELLO, BEAT):
        stream = await dial(bench.near, hello, Security(tls=tls))
        assert isinstance(stream, TlsStream) == (hello is HELLO)
        stream.close()
    await until(lambda: len(bench.owner.taken) == 2)
    assert [type(hello) for _, hello in bench.owner.taken] == [type(HELLO), type(BEAT)]
    with pytest.raises(OSError):  # noqa: PT011 - a reset or an end, by the kernel
        await dial(bench.near, HELLO, NONE)
    await bench.free()


async def test_endpoint_that_is_closed_has_no_descriptors(bench: Bench) -> None:
    assert len(forks.filenos()) == 2
    bench.endpoint.close_nowait()
    bench.endpoint.close_nowait()
    assert forks.filenos() == []
    for address in (bench.near, bench.far):
        with pytest.raises(ConnectionRefusedError):
            await dial(address, HELLO, SECRET)


async def test_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(OSError, match="assign"):
        Endpoint("192.0.2.1", Owner(), NONE)
