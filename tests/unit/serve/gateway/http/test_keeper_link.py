"""A gateway's link to its keeper, with a keeper that takes what it likes."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import KeeperLostError
from multiworld.serve.gateway.http import keeper_link
from multiworld.serve.gateway.http.keeper_link import KeeperLink, Recorded
from multiworld.serve.keeper.channel import Channel
from multiworld.serve.keeper.connection_record import ConnectionRecord
from multiworld.serve.keeper.frames import Entry, Kind, entry, frame

HANG_S = 20.0
LARGE = b"x" * 40_000_000
"""More than any socket takes."""


class Kept(Recorded):
    """A connection that notes what is done to it."""

    def __init__(self, number: int) -> None:
        self.record = ConnectionRecord(number)
        self.done: list[str] = []

    def hold(self) -> None:
        self.done.append("hold")

    def resume(self) -> None:
        self.done.append("resume")

    def pause_reading(self) -> None:
        self.done.append("pause_reading")

    def resume_reading(self) -> None:
        self.done.append("resume_reading")

    def fail(self) -> None:
        self.done.append("fail")

    def abandon(self) -> None:
        self.done.append("abandon")


class Keeper:
    """The other end: ``frames`` are those that it has read."""

    def __init__(self, path: Path) -> None:
        self.frames: list[list[Entry]] = []
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen()
        self.channel: Channel | None = None

    async def joined(self) -> None:
        self.listener.setblocking(False)
        self.sock, _ = await asyncio.get_running_loop().sock_accept(self.listener)

    def read(self) -> None:
        """Read from now on."""

        def framed(entries: list[Entry], descriptors: deque[int]) -> None:
            self.frames.append(entries)

        self.channel = Channel(self.sock, framed, lambda: None)

    @property
    def kinds(self) -> list[Kind]:
        return [said.kind for entries in self.frames for said in entries]

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        else:
            self.sock.close()
        self.listener.close()


@pytest.fixture
async def ends(tmp_path: Path) -> AsyncIterator[tuple[KeeperLink, Keeper]]:
    keeper = Keeper(tmp_path / "keeper")
    link = KeeperLink(tmp_path / "keeper", "gateway/1", 5.0, lambda *given: None)
    running = asyncio.ensure_future(link.run())
    async with asyncio.timeout(HANG_S):
        await keeper.joined()
        while not link.is_protected:  # noqa: ASYNC110
            await asyncio.sleep(0)
    yield link, keeper
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    keeper.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_nothing_is_written_before_the_keeper_can_have_it(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    link, keeper = ends
    connection, out = Kept(1), list[str]()
    link.add(connection)
    link.say(connection, Kind.INPUT, 1, LARGE)
    link.then(connection, lambda: out.append("first"))
    await asyncio.sleep(0.01)
    link.then(connection, lambda: out.append("second"))
    await asyncio.sleep(0.01)
    assert (out, connection.done) == ([], ["hold"])
    keeper.read()
    await until(lambda: len(out) == 2)
    assert out == ["first", "second"]
    assert connection.done[-1] == "resume"
    await until(lambda: Kind.INPUT in keeper.kinds)


async def test_stream_is_not_said_to_be_gone_while_the_keeper_is(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    link, keeper = ends
    keeper.read()
    connection = Kept(1)
    link.add(connection)
    asked = asyncio.ensure_future(link.find(connection, b"s"))
    await until(lambda: Kind.FIND in keeper.kinds)
    keeper.close()
    for asking in (asked, link.find(connection, b"s")):
        with pytest.raises(KeeperLostError):
            async with asyncio.timeout(1.0):  # less than ``FIND_S``
                await asking


async def test_connection_that_cannot_be_written_to_holds_no_other_back(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    link, keeper = ends
    keeper.read()
    broken, fine, out = Kept(1), Kept(2), list[str]()

    def fail() -> None:
        raise OSError("gone")

    for connection in (broken, fine):
        link.add(connection)
        link.say(connection, Kind.INPUT, 1, b"?")
    link.then(broken, fail)
    link.then(fine, lambda: out.append("written"))
    await until(lambda: out)
    assert broken.done == ["fail"]
    assert fine.done == []


async def test_what_waits_for_a_keeper_that_is_lost_is_written(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    link, keeper = ends
    connection, out = Kept(1), list[str]()
    link.add(connection)
    link.say(connection, Kind.INPUT, 1, LARGE)
    link.then(connection, lambda: out.append("written"))
    await asyncio.sleep(0.01)
    assert out == []
    keeper.sock.close()
    await until(lambda: out)


async def test_body_that_the_keeper_does_not_take_is_not_read_on(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    link, keeper = ends
    connection = Kept(1)
    link.add(connection)
    link.say(connection, Kind.INPUT, 1, LARGE)
    link.after_reading(connection, lambda: connection.done.append("take"))
    await asyncio.sleep(0.01)
    assert connection.done == ["pause_reading"]
    assert len(connection.record.input) <= keeper_link.MIRROR_BYTES
    keeper.read()
    await until(lambda: "resume_reading" in connection.done)
    assert connection.done == ["pause_reading", "take", "resume_reading"]


async def test_gateway_that_leaves_keeps_what_no_other_one_can_continue(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    link, keeper = ends
    keeper.read()
    kept, moved = Kept(1), Kept(2)
    link.add(kept)
    link.add(moved)
    leaving = asyncio.ensure_future(link.leave(HANG_S))
    await until(lambda: Kind.LEAVING in keeper.kinds)
    assert keeper.channel is not None
    answer = entry(Kind.HAND_OVER, 0, 1, (1).to_bytes(8, "little"))
    keeper.channel.send(frame([answer]))
    assert await leaving
    assert (kept.done, moved.done) == ([], ["abandon"])
    await until(lambda: Kind.RELEASED in keeper.kinds)


async def test_gateway_that_leaves_does_not_wait_for_a_keeper_that_hangs(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    """The keeper has answered, but takes nothing any more."""
    link, keeper = ends
    connection = Kept(1)
    link.add(connection)
    link.say(connection, Kind.INPUT, 1, LARGE)
    await asyncio.sleep(0)
    leaving = asyncio.ensure_future(link.leave(0.1))
    await asyncio.sleep(0)
    keeper.sock.sendall(frame([entry(Kind.HAND_OVER, 0, 1)]))
    async with asyncio.timeout(HANG_S):
        assert not await leaving
    assert "abandon" not in connection.done


async def test_gateway_that_leaves_may_ask_the_next_keeper(
    ends: tuple[KeeperLink, Keeper],
) -> None:
    link, keeper = ends
    keeper.read()
    moved = Kept(1)
    link.add(moved)
    leaving = asyncio.ensure_future(link.leave(HANG_S))
    await until(lambda: Kind.LEAVING in keeper.kinds)
    assert keeper.channel is not None
    keeper.channel.close()
    assert await leaving is None
    await keeper.joined()
    keeper.read()
    await until(lambda: link.is_protected)
    leaving = asyncio.ensure_future(link.leave(HANG_S))
    await until(lambda: keeper.kinds.count(Kind.LEAVING) == 2)
    keeper.channel.send(frame([entry(Kind.HAND_OVER, 0, 1)]))
    assert await leaving is True
    assert moved.done[-1] == "abandon"


async def test_gateway_that_leaves_hands_over_what_has_just_been_given_to_it(
    tmp_path: Path,
) -> None:
    """The protocol of a connection begins a moment after its record arrives."""
    keeper, given = Keeper(tmp_path / "keeper"), list[ConnectionRecord]()
    link = KeeperLink(
        tmp_path / "keeper", "gateway/1", 5.0, lambda sock, record: given.append(record)
    )
    running = asyncio.ensure_future(link.run())
    await keeper.joined()
    keeper.read()
    await until(lambda: link.is_protected)
    leaving = asyncio.ensure_future(link.leave(HANG_S))
    await until(lambda: Kind.LEAVING in keeper.kinds)
    assert keeper.channel is not None
    for data in ConnectionRecord(7, is_detached=True).frames():
        keeper.channel.send(data)
    keeper.channel.send(frame([entry(Kind.HAND_OVER, 0, 1)]))
    await until(lambda: given)
    await asyncio.sleep(0.05)
    assert not leaving.done()
    late = Kept(7)
    link.add(late)
    assert await leaving
    assert late.done == ["abandon"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    keeper.close()


async def test_keeper_that_dies_as_it_is_greeted_holds_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket still takes connections when its process is about to end."""
    path = tmp_path / "keeper"
    dying = Keeper(path)
    link = KeeperLink(path, "gateway/1", 5.0, lambda *given: None)
    connection, out = Kept(1), list[int]()
    link.add(connection)

    def reached(*given: Any) -> Channel:
        # Connected by the kernel, and never accepted.
        monkeypatch.undo()
        dying.listener.close()
        path.unlink()
        return Channel(*given)

    monkeypatch.setattr(keeper_link, "Channel", reached)
    running = asyncio.ensure_future(link.run())
    await until(lambda: not path.exists())

    def write(number: int) -> None:
        link.say(connection, Kind.INPUT, 1, b"?")
        link.then(connection, lambda: out.append(number))

    for number in range(3):
        write(number)
    await until(lambda: len(out) == 3)
    following = Keeper(path)
    async with asyncio.timeout(HANG_S):
        await following.joined()
    following.read()
    await until(lambda: link.is_protected)
    write(3)
    await until(lambda: len(out) == 4)
    assert out == [0, 1, 2, 3]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    following.close()
