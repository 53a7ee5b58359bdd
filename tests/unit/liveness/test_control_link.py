"""Control links, over a socket and inside a process: order, endings, garbage."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator

import pytest

from multiworld.liveness.control_link import Link, LinkKey, LocalLink, SocketLink
from multiworld.liveness.manager_messages import (
    Bye,
    ControlMessage,
    DatagramsAt,
    EndCollectives,
    Ready,
)
from multiworld.net import frames
from tests.unit.waiting import turns, until
from tests.wire import frame_of

HERE, THERE = LinkKey("there", "h0", "h1"), LinkKey("here", "h1", "h0")
ODD = Ready(nonce=13)
"""A message that the owners here cannot use."""


def note(number: int) -> EndCollectives:
    return EndCollectives(1, number, 0)


class Owner:
    def __init__(self) -> None:
        self.got: list[ControlMessage] = []
        self.ends: list[tuple[str, str]] = []

    def link_message(self, link: Link, message: ControlMessage) -> None:
        if message == ODD:
            raise ValueError("rank")
        self.got.append(message)

    def link_ended(self, link: Link, reason: str, evidence: str) -> None:
        self.ends.append((reason, evidence))


class Pair:
    def __init__(self, *, is_local: bool) -> None:
        self.owners = Owner(), Owner()
        one, other = self.owners
        self.links: tuple[Link, Link]
        if is_local:
            self.links = LocalLink.pair(HERE, one, THERE, other)
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self.links = SocketLink(HERE, ours, one), SocketLink(THERE, theirs, other)


@pytest.fixture(params=["socket", "local"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = Pair(is_local=request.param == "local")
    yield pair
    for link in pair.links:
        link.close()
    await turns(3)


async def test_messages_arrive_in_order_both_ways(pair: Pair) -> None:
    for number in range(50):
        for link in pair.links:
            link.send(note(number))
    await until(lambda: all(len(owner.got) == 50 for owner in pair.owners))
    for owner in pair.owners:
        assert owner.got == [note(number) for number in range(50)]
        assert owner.ends == []
    assert [link.key for link in pair.links] == [HERE, THERE]


async def test_end_without_a_bye_is_a_lost_process(pair: Pair) -> None:
    pair.links[0].send(note(1))
    pair.links[0].close()
    pair.links[0].close()
    await until(lambda: pair.owners[1].ends)
    await turns()
    assert pair.owners[1].got == [note(1)]
    ((reason, _),) = pair.owners[1].ends
    assert reason in ("its process ended", "its manager ended")
    assert pair.owners[0].ends == []


async def test_end_after_a_bye_is_intended(pair: Pair) -> None:
    """The peer closed its manager; that is no fault."""
    pair.links[0].say_bye()
    pair.links[0].close()
    await until(lambda: pair.owners[1].ends)
    assert pair.owners[1].ends[0][0] == "it closed its manager"
    assert pair.owners[1].got == []


async def test_bye_of_both_sides_ends_without_a_report(pair: Pair) -> None:
    """Each side closed by itself and needs no notice."""
    for link in pair.links:
        link.say_bye()
        link.close()
    await turns()
    assert [owner.ends for owner in pair.owners] == [[], []]


async def test_closed_link_takes_and_delivers_nothing(pair: Pair) -> None:
    """Messages on their way to a closed end are dropped; sending never fails."""
    pair.links[1].send(note(1))
    pair.links[0].close()
    pair.links[0].send(note(2))
    pair.links[0].say_bye()
    await until(lambda: pair.owners[1].ends)
    assert pair.owners[0].got == []
    assert pair.owners[1].got == []
    pair.links[1].send(note(3))
    await turns()


# Over a socket only.


class Wire:
    """A link whose far end is a bare socket."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.owner = Owner()
        self.link = SocketLink(HERE, ours, self.owner)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    wire.link.close()
    wire.peer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"garbage, more than four bytes",
        frame_of([]),
        frame_of({}),
        frame_of({"op": "new in a later release"}),
        frame_of({"op": "Ready"}),
        frame_of({"op": "DatagramsAt", "port": "5"}),
    ],
)
async def test_garbage_is_a_violation_and_says_so(wire: Wire, data: bytes) -> None:
    """The verdict names the protocol, not the process; earlier messages count."""
    before, after = DatagramsAt(1, 1), DatagramsAt(2, 1)
    wire.peer.sendall(frames.encode(before) + data + frames.encode(after))
    await until(lambda: wire.owner.ends)
    assert wire.owner.got == [before]
    assert "violated the protocol" in wire.owner.ends[0][0]


async def test_message_that_the_owner_cannot_use_is_a_violation(wire: Wire) -> None:
    wire.link.say_bye()
    wire.peer.sendall(frames.encode(Bye()) + frames.encode(ODD))
    await until(lambda: wire.owner.ends)
    assert "violated the protocol" in wire.owner.ends[0][0]


async def test_reset_connection_names_the_kernel_as_evidence(wire: Wire) -> None:
    """A process that dies with unread messages resets its connections."""
    wire.link.send(note(1))
    wire.peer.close()
    await until(lambda: wire.owner.ends)
    ((reason, evidence),) = wire.owner.ends
    assert "reset" in reason
    assert "reset" in evidence


async def test_reset_after_a_bye_is_still_a_bye(wire: Wire) -> None:
    """The peer's own message counts more than how its socket ended."""
    wire.peer.sendall(frames.encode(Bye()))
    await turns(3)
    wire.link.send(note(1))
    wire.peer.close()
    await until(lambda: wire.owner.ends)
    assert wire.owner.ends[0][0] == "it closed its manager"
