"""Frames in both directions: torn, garbled, too many, and the end of a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from multiworld.net import frames
from multiworld.net.framed_connection import ENDED, FramedConnection
from multiworld.net.handshake_messages import Message
from tests.unit.inner_state import fileno
from tests.unit.waiting import turns, until
from tests.wire import frame_of


class Note(Message, frozen=True):
    n: int
    text: str = ""


notes = msgspec.json.Decoder(Note)


class Side:
    """One end of a socket pair with a framed connection; the test holds the other."""

    def __init__(self, on_message: Callable[[Note], None] | None = None):
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.got: list[Note] = []
        self.ends: list[tuple[str, bool]] = []
        self.framed = FramedConnection(
            ours,
            notes,
            on_message or self.got.append,
            lambda evidence, is_broken: self.ends.append((evidence, is_broken)),
        )

    def free(self) -> None:
        self.framed.close()
        self.peer.close()


@pytest.fixture
async def side() -> Any:
    side = Side()
    yield side
    side.free()


async def test_frames_arrive_byte_by_byte(side: Side) -> None:
    for byte in frames.encode(Note(1)) + frames.encode(Note(2)):
        assert Note(2) not in side.got
        side.peer.send(bytes([byte]))
        await turns(2)
    await until(lambda: len(side.got) == 2)
    assert side.got == [Note(1), Note(2)]
    assert side.ends == []


async def test_many_frames_in_one_read_are_all_reported(side: Side) -> None:
    side.peer.sendall(b"".join(frames.encode(Note(n)) for n in range(100)))
    await until(lambda: len(side.got) == 100)
    assert [note.n for note in side.got] == list(range(100))


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{]",
        b"\xff" * 9,
    ],
)
async def test_garbage_ends_the_connection_as_a_violation(
    side: Side, garbage: bytes
) -> None:
    side.peer.sendall(frames.encode(Note(1)) + garbage + frames.encode(Note(2)))
    await until(lambda: side.ends)
    assert side.got == [Note(1)]
    ((evidence, is_broken),) = side.ends
    assert is_broken
    assert "FrameError" in evidence
    assert fileno(side.framed) == -1


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"op": "Note"},
        {"op": "Note", "n": "1"},
        {"op": "Note", "n": None},
        {"op": "Note", "n": 1, "text": ["x"]},
        {"op": "new in a later release", "n": 1},
        b'{"op":"Note","n":1e999}',
    ],
)
async def test_message_that_is_not_expected_is_a_violation(
    side: Side, body: object
) -> None:
    unhandled: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    side.peer.sendall(frames.encode(Note(1)) + frame_of(body) + frames.encode(Note(2)))
    await until(lambda: side.ends or unhandled)
    await turns()
    assert not unhandled
    assert side.got == [Note(1)]
    ((evidence, is_broken),) = side.ends
    assert is_broken
    assert "FrameError" in evidence


async def test_message_that_the_owner_cannot_use_is_a_violation() -> None:
    """Its fields may have the right types and make no sense together."""

    def refuse(message: Note) -> None:
        raise ValueError("world")

    side = Side(refuse)
    side.peer.sendall(frames.encode(Note(1)))
    await until(lambda: side.ends)
    assert side.ends == [(repr(ValueError("world")), True)]
    side.free()


async def test_end_of_the_peer_is_reported_once_and_is_no_violation(side: Side) -> None:
    side.peer.sendall(frames.encode(Note(1)))
    side.peer.close()
    await until(lambda: side.ends)
    await turns()
    assert side.got == [Note(1)]
    assert side.ends == [(ENDED, False)]


async def test_peer_that_dies_within_a_frame_is_an_end(side: Side) -> None:
    side.peer.sendall(frames.encode(Note(1))[:-1])
    side.peer.close()
    await until(lambda: side.ends)
    assert side.got == []
    assert side.ends == [(ENDED, False)]


async def test_close_reports_nothing_and_is_safe_to_repeat(side: Side) -> None:
    """The owner who closes needs no notice, and later sends are dropped."""
    side.peer.sendall(frames.encode(Note(1)))
    side.framed.close()
    side.framed.close()
    side.framed.send(Note(0, "too late"))
    await turns()
    assert (side.got, side.ends) == ([], [])
    assert side.framed.backlog == 0
    with pytest.raises(BrokenPipeError):
        side.peer.send(b"x")


async def test_owner_that_closes_in_a_message_gets_no_more() -> None:
    got = []

    def take(message: Note) -> None:
        got.append(message)
        owner.framed.close()

    owner = Side(take)
    owner.peer.sendall(frames.encode(Note(1)) + frames.encode(Note(2)))
    await until(lambda: got)
    await turns()
    assert got == [Note(1)]
    assert owner.ends == []
    owner.free()


def received(sock: socket.socket) -> Iterator[bytes]:
    """Return what a non-blocking socket holds now."""
    while True:
        try:
            yield sock.recv(1 << 20)
        except BlockingIOError:
            return


async def test_slow_reader_gets_everything_in_order(side: Side) -> None:
    messages = [Note(n, "x" * 50_000) for n in range(40)]
    for message in messages:
        side.framed.send(message)
    assert side.framed.backlog > 0
    side.peer.setblocking(False)
    data = b""
    wanted = b"".join(map(frames.encode, messages))
    async with asyncio.timeout(20):
        while len(data) < len(wanted):
            data += b"".join(received(side.peer))
            await asyncio.sleep(0)
    assert data == wanted
    assert side.framed.backlog == 0
    assert side.ends == []


async def test_reason_of_a_peer_that_closed_is_read_though_sending_fails(
    side: Side,
) -> None:
    """A failed send is not the end: the peer's last words come first."""
    side.peer.sendall(frames.encode(Note(0, "it is over")))
    side.peer.shutdown(socket.SHUT_RD)
    side.peer.close()
    side.framed.send(Note(1))
    assert side.framed.backlog == 0
    await until(lambda: side.ends)
    assert side.got == [Note(0, "it is over")]
    ((_, is_broken),) = side.ends
    assert not is_broken


async def test_too_long_message_is_refused_and_the_connection_lives(side: Side) -> None:
    with pytest.raises(frames.FrameError):
        side.framed.send(Note(0, "x" * (frames.MAX_FRAME_BYTES + 1)))
    side.framed.send(Note(1))
    side.peer.setblocking(False)
    assert b"".join(received(side.peer)) == frames.encode(Note(1))
