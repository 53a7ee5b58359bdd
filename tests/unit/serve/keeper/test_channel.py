"""Channels whose peer dies: all that it has said is heard."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterator

import pytest

from multiworld.serve.keeper import frames
from multiworld.serve.keeper.channel import ANCILLARY_BYTES, Channel
from multiworld.serve.keeper.frames import Entry, FrameReader, Kind, entry, frame

BEAT = frame([entry(Kind.BEAT)])


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


async def heard_of(
    sock: socket.socket, answers: Kind | None = None, sends: int = 0
) -> tuple[list[Kind], int]:
    """Return what a channel hears until it is lost, and the descriptors it gets."""
    lost = asyncio.Event()
    found: list[Kind] = []
    got = 0

    def framed(entries: list[Entry], descriptors: deque[int]) -> None:
        nonlocal got
        found.extend(each.kind for each in entries)
        while descriptors:
            socket.socket(fileno=descriptors.popleft()).close()
            got += 1
        if answers in [each.kind for each in entries]:
            channel.send(BEAT)

    channel = Channel(sock, framed, lost.set)
    for _ in range(sends):
        channel.send(BEAT)
    async with asyncio.timeout(10.0):
        await lost.wait()
    return found, got


async def test_what_a_peer_said_before_its_end_is_heard_after_a_failed_answer(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    own, peer = pair
    said = [entry(Kind.ITEM, 5, 0, b"token"), entry(Kind.OUTPUT, 5, 1, b"data")]
    peer.sendall(BEAT + frame(said))
    peer.close()
    found, _ = await heard_of(own, answers=Kind.BEAT)
    assert found == [Kind.BEAT, Kind.ITEM, Kind.OUTPUT]


async def test_connections_that_a_peer_gave_before_its_end_arrive(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    own, peer = pair
    with socket.socket() as given:
        for number in range(3):
            said = [entry(Kind.CONNECTION, number), entry(Kind.COMPLETE, number)]
            socket.send_fds(peer, [frame(said)], [given.fileno()])
    peer.close()
    found, descriptors = await heard_of(own, sends=2)
    assert found == [Kind.CONNECTION, Kind.COMPLETE] * 3
    assert descriptors == 3


async def test_channel_is_lost_when_descriptors_are(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows would be taken for another connection's."""
    monkeypatch.setattr("multiworld.serve.keeper.channel.ANCILLARY_BYTES", 0)
    assert ANCILLARY_BYTES
    own, peer = pair
    with socket.socket() as given:
        said = [entry(Kind.CONNECTION, 1), entry(Kind.COMPLETE, 1)]
        socket.send_fds(peer, [frame(said)], [given.fileno()])
        found, descriptors = await heard_of(own)
    assert (found, descriptors) == ([], 0)


def test_entries_are_cut_into_frames_that_the_peer_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 100)
    entries = [entry(Kind.OUTPUT, 7, number, b"x" * 40) for number in range(5)]
    made = frames.frames(entries)
    assert len(made) == 5
    reader = FrameReader()
    found = [each for data in made for cut in reader.feed(data) for each in cut]
    assert [each.value for each in found] == list(range(5))
    assert frames.frames([]) == [frame([])]
