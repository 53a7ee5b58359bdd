"""Heartbeat connections to the peers, their replacement, and UDP beside them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator

import pytest

from multiworld.liveness.control_link import LinkKey
from multiworld.liveness.heartbeat import HeartbeatReport
from multiworld.liveness.heartbeat_links import HeartbeatLinks
from multiworld.liveness.manager_messages import ControlMessage, DatagramsAt
from multiworld.net import forks
from multiworld.testing import no_leaks
from tests.unit.inner_state import datagram_sockets

SEAL = b"s" * 32
HANG_S = 20.0


class Link:
    def __init__(self, key: LinkKey) -> None:
        self.key = key
        self.sent: list[ControlMessage] = []

    def send(self, message: ControlMessage) -> None:
        self.sent.append(message)

    def say_bye(self) -> None:
        pass

    def close(self) -> None:
        pass


class Side:
    def __init__(self, peer: str, host: str = "127.0.0.1") -> None:
        self.link = Link(LinkKey(peer, host, host))
        self.heard: list[HeartbeatReport] = []
        self.heard_from: set[LinkKey] = set()
        self.ended = 0
        self.links = HeartbeatLinks("thread", 0.1, self._on_heard, self._on_ended)

    def _on_heard(self, key: LinkKey, report: HeartbeatReport) -> None:
        self.heard.append(report)
        self.heard_from.add(key)

    def _on_ended(self, key: LinkKey) -> None:
        self.ended += 1

    def port(self) -> int:
        last = self.link.sent[-1]
        assert isinstance(last, DatagramsAt)
        return last.port

    def targets(self) -> list[int]:
        """Return the ports that the UDP sockets are connected to."""
        found = []
        for sock in datagram_sockets(self.links):
            assert sock.fileno() in forks.filenos()
            try:
                found.append(sock.getpeername()[1])
            except OSError:
                found.append(0)
        return found

    async def until_heard(self) -> None:
        count = len(self.heard)
        async with asyncio.timeout(HANG_S):
            while len(self.heard) == count:
                await self.links.tick()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


class Bench:
    """Two managers, one of which dialed the other."""

    def __init__(self) -> None:
        self.dialer, self.acceptor = Side("b"), Side("a")
        self.number = 0

    def begin(self, pair: tuple[socket.socket, socket.socket] | None = None) -> None:
        """Connect both; a second call replaces the connection."""
        ours, theirs = pair or socket.socketpair()
        self.number += 1
        for side, sock, dialed in (
            (self.dialer, ours, True),
            (self.acceptor, theirs, False),
        ):
            side.links.begin(side.link, sock, SEAL, dialed=dialed, number=self.number)

    def tell_ports(self) -> None:
        """Deliver to each side the port that the other has announced."""
        for one, other in (
            (self.dialer, self.acceptor),
            (self.acceptor, self.dialer),
        ):
            one.links.datagrams_at(one.link.key, DatagramsAt(other.port(), self.number))


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with no_leaks():
        bench = Bench()
        yield bench
        bench.dialer.links.close()
        bench.acceptor.links.close()


async def test_peers_of_one_host_hear_each_other_without_udp(bench: Bench) -> None:
    """A Unix socket loses nothing."""
    bench.begin()
    await bench.dialer.until_heard()
    await bench.acceptor.until_heard()
    assert bench.dialer.link.sent == []
    assert bench.dialer.links.has(bench.dialer.link.key)


async def test_reflected_or_foreign_frames_do_not_count(bench: Bench) -> None:
    """Each direction has a key of its own, so that an echo proves nothing."""
    bench.begin()
    echo = Link(LinkKey("echo", "127.0.0.1", "127.0.0.1"))
    ours, theirs = socket.socketpair()
    bench.dialer.links.begin(echo, ours, SEAL, dialed=True, number=1)
    theirs.setblocking(False)
    echoed = 0
    for _ in range(4):
        await bench.dialer.until_heard()
        with contextlib.suppress(BlockingIOError):
            echoed += theirs.send(theirs.recv(4096))
    theirs.close()
    assert echoed
    assert echo.key not in bench.dialer.heard_from


async def test_peers_on_two_hosts_exchange_their_udp_ports(
    bench: Bench,
) -> None:
    bench.begin(tcp_pair())
    assert isinstance(bench.dialer.link.sent[0], DatagramsAt)
    assert bench.dialer.targets() == [0]
    bench.tell_ports()
    assert bench.dialer.targets() == [bench.acceptor.port()]
    assert bench.acceptor.targets() == [bench.dialer.port()]
    await bench.dialer.until_heard()


async def test_port_that_comes_before_the_connection_is_kept(bench: Bench) -> None:
    """The control link may be quicker than the heartbeat connection."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.bind(("127.0.0.1", 0))
        port = peer.getsockname()[1]
        bench.dialer.links.datagrams_at(bench.dialer.link.key, DatagramsAt(port, 1))
        bench.begin(tcp_pair())
        assert bench.dialer.targets() == [port]


@pytest.mark.parametrize("port", [0, -1, 65536, 10**30])
async def test_wrong_port_is_ignored(bench: Bench, port: int) -> None:
    """The port comes from the peer, which may send any integer."""
    bench.begin(tcp_pair())
    bench.dialer.links.datagrams_at(bench.dialer.link.key, DatagramsAt(port, 1))
    assert bench.dialer.targets() == [0]


async def test_name_instead_of_an_address_means_no_udp(bench: Bench) -> None:
    """A look-up would block the event loop."""
    named = Side("b", host="localhost")
    ours, theirs = tcp_pair()
    named.links.begin(named.link, ours, SEAL, dialed=True, number=1)
    assert named.link.sent == []
    assert named.targets() == []
    named.links.close()
    theirs.close()


async def test_ended_connection_is_reported_and_can_be_replaced(bench: Bench) -> None:
    bench.begin()
    await bench.dialer.until_heard()
    bench.acceptor.links.end(bench.acceptor.link.key)
    bench.acceptor.links.end(bench.acceptor.link.key)
    assert not bench.acceptor.links.has(bench.acceptor.link.key)
    async with asyncio.timeout(HANG_S):
        while not bench.dialer.ended:
            await bench.dialer.links.tick()
    bench.begin()
    bench.dialer.heard.clear()
    await bench.dialer.until_heard()
    await bench.acceptor.until_heard()
    assert bench.dialer.ended == 1


async def test_replaced_connection_uses_the_new_udp_ports(bench: Bench) -> None:
    bench.begin(tcp_pair())
    bench.tell_ports()
    bench.begin(tcp_pair())
    assert bench.dialer.targets() == [0]
    bench.tell_ports()
    assert bench.dialer.targets() == [bench.acceptor.port()]
    assert bench.acceptor.targets() == [bench.dialer.port()]


async def test_helper_that_cannot_start_closes_the_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog tries again with another connection."""
    links = HeartbeatLinks("process", 0.1, lambda *_: None, print)
    link = Link(LinkKey("b", "127.0.0.1", "127.0.0.1"))
    ours, theirs = socket.socketpair()
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/no/python")
        with pytest.raises(FileNotFoundError):
            links.begin(link, ours, SEAL, dialed=True, number=1)
    assert ours.fileno() == -1
    assert not links.has(link.key)
    assert not datagram_sockets(links)
    theirs.close()
    links.close()
