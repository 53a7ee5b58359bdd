"""The listener: whom it lets in, and the cost of untrusted peers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest

from multiworld import Security, Tls
from multiworld.net import forks, frames, listener
from multiworld.net.handshake import HandshakeError, dialing, refusal
from multiworld.net.handshake_messages import Answer, Hello
from multiworld.net.listener import Listener, read_frame
from multiworld.net.streams import Stream, TlsStream, start_tls, write_all
from multiworld.net.tcp import tune
from tests.unit.waiting import until
from tests.wire import frame_of

SECRET = Security(secret=b"a secret long enough to be one")
OTHER = Security(secret=b"another that is long enough, too")

answers = msgspec.json.Decoder(Answer)


class Visit(Hello, frozen=True):
    kind: str


def kind_of(hello: Hello) -> str:
    assert isinstance(hello, Visit)
    return hello.kind


class Owner:
    """Owner that keeps what it is given, and refuses what the test tells it to."""

    hellos = Visit

    def __init__(self) -> None:
        self.taken: list[tuple[Stream, Hello]] = []
        self.away: list[str] = []
        self.special: dict[str, Security] = {}
        self.unwanted: set[str] = set()

    def security_for(self, hello: Hello) -> Security | None:
        if kind_of(hello) == "never":
            raise HandshakeError("refused", "never", answer=refusal("never"))
        return self.special.get(kind_of(hello))

    def refusal(self, hello: Hello) -> str | None:
        return "unwanted" if kind_of(hello) in self.unwanted else None

    def take(self, stream: Stream, hello: Hello) -> None:
        if kind_of(hello) == "broken":
            raise ValueError("it has a connection already")
        self.taken.append((stream, hello))

    def turned_away(self, hello: Hello, error: HandshakeError, where: object) -> None:
        self.away.append(error.kind)


class Bench:
    def __init__(self, security: Security) -> None:
        self.owner = Owner()
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setblocking(False)
        self.where = sock.getsockname()
        self.listener = Listener(
            [sock], self.owner, security, logging.getLogger("multiworld.test"), "it"
        )
        self._open: list[Stream] = []

    async def connect(self) -> socket.socket:
        sock = socket.socket()
        self._open.append(sock)
        tune(sock)
        await asyncio.get_running_loop().sock_connect(sock, self.where)
        return sock

    async def greet(
        self, kind: str, security: Security, stream: Stream | None = None
    ) -> Stream:
        stream = stream or await self.connect()
        steps = dialing(Visit(kind=kind), security)
        try:
            frame = next(steps)
            while True:
                await write_all(stream, frame)
                frame = steps.send(await read_frame(stream))
        except StopIteration:
            return stream

    async def encrypted(self, tls: Tls) -> TlsStream:
        sock = await self.connect()
        stream = await start_tls(sock, tls.context(is_server=False), is_server=False)
        self._open.append(stream)
        return stream

    async def refused(self, kind: str) -> None:
        await until(lambda: self.listener.refused[kind])
        assert dict(self.listener.refused) == {kind: 1}
        assert self.owner.taken == []

    async def free(self) -> None:
        await self.listener.close()
        for stream in (*self._open, *(stream for stream, _ in self.owner.taken)):
            stream.close()


@pytest.fixture
async def make() -> AsyncIterator[Callable[[Security], Bench]]:
    benches: list[Bench] = []

    def one(security: Security) -> Bench:
        benches.append(Bench(security))
        return benches[-1]

    yield one
    for bench in benches:
        await bench.free()


Make = Callable[[Security], Bench]


async def is_closed(sock: socket.socket) -> bool:
    """Return whether the other side closed a connection, once it does anything."""
    async with asyncio.timeout(20):
        try:
            return await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize("security", [Security(), SECRET])
async def test_authenticated_connection_is_handed_over(
    make: Make, security: Security
) -> None:
    bench = make(security)
    stream = await bench.greet("link", security)
    await until(lambda: bench.owner.taken)
    ((theirs, hello),) = bench.owner.taken
    assert kind_of(hello) == "link"
    theirs.send(b"x")
    assert await is_closed(stream) is False  # type: ignore[arg-type]
    assert dict(bench.listener.refused) == {}


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"\x00\x00\x00\x02[]",
        frame_of({"multiworld": "x", "kind": "link"}),
        frame_of({"multiworld": frames.PROTOCOL_VERSION}),
        frame_of({"multiworld": frames.PROTOCOL_VERSION, "kind": ["link"]}),
        b"\x00\x00\x00\x05 oops",
        (1 << 20).to_bytes(4, "big"),
    ],
)
async def test_garbage_is_disconnected_and_counted(make: Make, garbage: bytes) -> None:
    """A port scanner or a browser disturbs nobody."""
    bench = make(Security())
    peer = await bench.connect()
    await write_all(peer, garbage)
    assert await is_closed(peer)
    await bench.refused("malformed")
    await bench.greet("link", Security())
    await until(lambda: bench.owner.taken)


async def test_refusals_are_all_counted_and_few_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A port scanner must not fill the log."""
    one = make(Security()).listener
    for number in range(500):
        one.count("malformed", ("10.0.0.1", number), "garbage")
    one.count("secret", ("10.0.0.1", 1), "wrong")
    assert one.refused == {"malformed": 500, "secret": 1}
    logged = [each for each in caplog.records if each.name == "multiworld.test"]
    assert len(logged) == 2


async def test_peer_that_dies_in_the_handshake_is_counted(make: Make) -> None:
    bench = make(Security())
    peer = await bench.connect()
    await write_all(peer, frames.encode(Visit(kind="link"))[:7])
    peer.close()
    await bench.refused("malformed")


async def test_silent_peer_is_disconnected(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_S", 0.01)
    bench = make(Security())
    peer = await bench.connect()
    assert await is_closed(peer)
    await bench.refused("slow")


async def test_slow_peer_is_disconnected_within_the_challenge(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HELLO_S", 0.05)
    bench = make(SECRET)
    peer = await bench.connect()
    await write_all(peer, next(dialing(Visit(kind="link"), SECRET)))
    assert frames.decode_body(await read_frame(peer), answers).challenge
    assert await is_closed(peer)
    await bench.refused("slow")


async def test_many_silent_peers_block_no_other_peer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest unfinished handshake makes room for a new one."""
    monkeypatch.setattr(listener, "MAX_GREETING", 2)
    bench = make(Security())
    silent = [await bench.connect() for _ in range(2)]
    await until(lambda: len(forks.filenos()) == 3)
    await bench.greet("link", Security())
    await until(lambda: bench.owner.taken)
    assert await is_closed(silent[0])
    assert dict(bench.listener.refused) == {"crowded": 1}
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert names.count("multiworld hello") == 1
    await bench.greet("late", Security(), silent[1])
    await until(lambda: len(bench.owner.taken) == 2)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SECRET, OTHER), (SECRET, Security()), (Security(), SECRET)],
)
async def test_other_secret_is_refused_on_both_sides(
    make: Make, ours: Security, theirs: Security
) -> None:
    bench = make(ours)
    with pytest.raises(HandshakeError) as refused:
        await bench.greet("link", theirs)
    assert refused.value.kind == "secret"
    await bench.refused("secret")
    assert bench.owner.away == ["secret"]


@pytest.mark.parametrize(
    ("hello", "theirs", "away"),
    [
        ({"kind": "link", "multiworld": 999}, 999, ["version"]),
        ({"purpose": "as later releases say it", "multiworld": 999}, 999, []),
        ({}, 0, []),
    ],
)
async def test_other_version_is_refused_with_both_numbers(
    make: Make, hello: dict[str, object], theirs: int, away: list[str]
) -> None:
    """The answer lets an old release say what is wrong, whatever its hellos are."""
    bench = make(Security())
    peer = await bench.connect()
    await write_all(peer, frame_of(hello))
    answer = frames.decode_body(await read_frame(peer), answers)
    assert answer.multiworld == frames.PROTOCOL_VERSION
    assert not answer.ok
    assert f"the dialer {theirs}" in answer.error
    await bench.refused("version")
    assert bench.owner.away == away


async def test_unwanted_connection_learns_the_reason_after_its_proof(
    make: Make,
) -> None:
    """Only an authenticated peer receives the owner's reason."""
    bench = make(SECRET)
    bench.owner.unwanted.add("link")
    with pytest.raises(HandshakeError, match="unwanted"):
        await bench.greet("link", SECRET)
    await bench.refused("refused")
    with pytest.raises(HandshakeError) as refused:
        await bench.greet("link", OTHER)
    assert refused.value.kind == "secret"


async def test_owner_may_demand_another_secret_or_refuse_at_once(make: Make) -> None:
    """A connection for heartbeats proves the key of its link."""
    bench = make(SECRET)
    bench.owner.special["beat"] = OTHER
    await bench.greet("beat", OTHER)
    await until(lambda: bench.owner.taken)
    with pytest.raises(HandshakeError):
        await bench.greet("beat", SECRET)
    with pytest.raises(HandshakeError):
        await bench.greet("never", SECRET)
    await until(lambda: bench.listener.refused["refused"] == 1)
    assert bench.listener.refused["secret"] == 1


async def test_hello_that_the_owner_cannot_take_closes_the_connection(
    make: Make,
) -> None:
    """Such a hello is the dialer's fault."""
    bench = make(Security())
    stream = await bench.greet("broken", Security())
    assert await is_closed(stream)  # type: ignore[arg-type]
    await bench.refused("malformed")


async def test_connection_without_tls_is_refused_where_tls_is_on(
    make: Make, tls: Tls
) -> None:
    """Plain text cannot get around TLS."""
    bench = make(Security(tls=tls))
    plain = await bench.connect()
    await write_all(plain, next(dialing(Visit(kind="link"), Security())))
    assert await is_closed(plain)
    await bench.refused("tls")


async def test_connection_under_tls_is_handed_over_encrypted(
    make: Make, tls: Tls
) -> None:
    bench = make(Security(tls=tls))
    await bench.greet("link", Security(), await bench.encrypted(tls))
    await until(lambda: bench.owner.taken)
    assert isinstance(bench.owner.taken[0][0], TlsStream)


async def test_special_connection_needs_no_tls(make: Make, tls: Tls) -> None:
    """Heartbeats come from a helper without TLS; a key of their own protects them."""
    bench = make(Security(tls=tls))
    bench.owner.special["beat"] = SECRET
    await bench.greet("beat", SECRET)
    await until(lambda: bench.owner.taken)
    assert isinstance(bench.owner.taken[0][0], socket.socket)


async def test_broken_tls_handshake_is_counted(make: Make, tls: Tls) -> None:
    bench = make(Security(tls=tls))
    peer = await bench.connect()
    await write_all(peer, b"\x16\x03\x01\x00\x05hello and more")
    assert await is_closed(peer) is False  # the alert
    await bench.refused("tls")


async def test_close_ends_handshakes_and_closes_every_descriptor(
    make: Make,
) -> None:
    bench = make(Security())
    silent = [await bench.connect() for _ in range(3)]
    await until(lambda: len(forks.filenos()) == 4)
    found = forks.filenos()
    await bench.listener.close()
    await bench.listener.close()
    bench.listener.close_nowait()
    assert forks.filenos() == []
    for fd in found:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
    assert [await is_closed(sock) for sock in silent] == [True] * 3
    with pytest.raises(ConnectionRefusedError):
        await bench.connect()


async def test_descriptor_within_a_tls_handshake_is_known(make: Make, tls: Tls) -> None:
    """A forked child must close a connection at whatever step it is."""
    bench = make(Security(tls=tls))
    peer = await bench.connect()
    await until(lambda: len(forks.filenos()) == 2)
    await write_all(peer, b"\x16")
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(forks.filenos()) == 2


async def test_misbehaviour_after_the_handshake_is_counted_too(make: Make) -> None:
    """The store counts members that violate the protocol later."""
    bench = make(Security())
    bench.listener.count("malformed", "a member", "evidence")
    assert bench.listener.refused["malformed"] == 1


# Reading one frame.


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    yield ours, theirs
    ours.close()
    theirs.close()


Ends = tuple[socket.socket, socket.socket]


async def test_frames_are_read_one_after_the_other(ends: Ends) -> None:
    ends[1].send(frame_of(b"one") + frame_of(b"") + frame_of(b"three"))
    assert [await read_frame(ends[0]) for _ in range(3)] == [b"one", b"", b"three"]


@pytest.mark.parametrize("kept", [0, 3, 4, 8])
async def test_torn_frame_is_the_end_of_the_connection(ends: Ends, kept: int) -> None:
    ends[1].send(frame_of({"key": "value"})[:kept])
    ends[1].close()
    with pytest.raises(ConnectionResetError):
        await read_frame(ends[0])


async def test_read_refuses_a_frame_beyond_its_limit(ends: Ends) -> None:
    """A peer's frame is refused by its length, before its body arrives."""
    ends[1].send((101).to_bytes(4, "big"))
    with pytest.raises(frames.FrameError):
        await read_frame(ends[0], limit=100)
