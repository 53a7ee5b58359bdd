"""Data connections that meet their worlds, in any order, or never."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest

from multiworld.liveness import pending_lanes
from multiworld.liveness.pending_lanes import KEPT_S, LaneKey, PendingLanes
from tests.unit.waiting import turns

KEY: LaneKey = (77, 1, "p2p")


class Bench:
    def __init__(self) -> None:
        self.lanes = PendingLanes()
        self.sockets: list[socket.socket] = []

    def put(self, key: LaneKey = KEY) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        self.sockets += [ours, theirs]
        ours.setblocking(False)
        theirs.setblocking(False)
        self.lanes.put(key, ours)
        return ours, theirs


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.lanes.close()
    for sock in bench.sockets:
        sock.close()


async def test_connection_waits_for_its_world(bench: Bench) -> None:
    """The dialing side is often first."""
    ours, _ = bench.put()
    assert bench.lanes.has(KEY)
    assert await bench.lanes.get(KEY) is ours
    assert not bench.lanes.has(KEY)


async def test_world_waits_for_its_connection(bench: Bench) -> None:
    getting = asyncio.create_task(bench.lanes.get(KEY))
    await turns(3)
    for other in ((78, 1, "p2p"), (77, 2, "p2p"), (77, 1, "collective")):
        bench.put(other)
    await turns(3)
    assert not getting.done()
    assert not bench.lanes.has(KEY)
    ours, _ = bench.put()
    assert await getting is ours


async def test_second_connection_for_a_lane_is_refused(bench: Bench) -> None:
    """A peer must not replace a connection that waits."""
    ours, _ = bench.put()
    with pytest.raises(ValueError, match="already has a connection"):
        bench.put()
    assert await bench.lanes.get(KEY) is ours


async def test_cancelled_wait_leaves_nothing(bench: Bench) -> None:
    """A later world with the same key starts anew."""
    getting = asyncio.create_task(bench.lanes.get(KEY))
    await turns(3)
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    ours, _ = bench.put()
    assert await bench.lanes.get(KEY) is ours


async def test_connection_that_comes_in_the_instant_of_cancelling_is_closed(
    bench: Bench,
) -> None:
    """Nobody owns it any more."""
    getting = asyncio.create_task(bench.lanes.get(KEY))
    await turns(3)
    ours, _ = bench.put()
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert ours.fileno() == -1
    assert not bench.lanes.has(KEY)


async def test_ended_incarnation_closes_its_connections_and_waits(bench: Bench) -> None:
    ours, _ = bench.put()
    other, _ = bench.put((78, 1, "p2p"))
    waits = asyncio.create_task(bench.lanes.get((77, 2, "p2p")))
    await turns(3)
    bench.lanes.drop(77)
    bench.lanes.drop(77)
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert ours.fileno() == -1
    assert other.fileno() >= 0
    assert bench.lanes.has((78, 1, "p2p"))


async def test_connection_for_an_unknown_incarnation_is_kept_for_a_while(
    bench: Bench,
) -> None:
    """Its world may be admitted soon; one of a known world waits without limit."""
    unknown, _ = bench.put()
    known, _ = bench.put((78, 1, "p2p"))
    now = time.monotonic()
    bench.lanes.purge({78}, now)
    assert unknown.fileno() >= 0
    bench.lanes.purge({78}, now + KEPT_S + 1)
    assert unknown.fileno() == -1
    assert known.fileno() >= 0


async def test_connection_that_the_other_side_gave_up_is_closed(bench: Bench) -> None:
    """One that has sent something before its end is kept: its bytes count."""
    gone, far = bench.put()
    far.close()
    spoke, far = bench.put((78, 1, "p2p"))
    far.send(b"x")
    far.close()
    waiting = asyncio.create_task(bench.lanes.get((79, 1, "p2p")))
    await turns(3)
    bench.lanes.purge({77, 78, 79}, time.monotonic())
    assert gone.fileno() == -1
    assert spoke.fileno() >= 0
    assert not waiting.done()
    bench.lanes.close()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_connection_that_was_reset_is_closed(bench: Bench) -> None:
    """A dialer that died with unread bytes resets it."""
    ours, far = bench.put()
    ours.send(b"unread")
    far.close()
    bench.lanes.purge({77}, time.monotonic())
    assert ours.fileno() == -1


async def test_flood_of_connections_fills_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misbehaving peer cannot make this process keep any number."""
    monkeypatch.setattr(pending_lanes, "LIMIT", 3)
    for number in range(3):
        assert not bench.lanes.is_full
        bench.put((number, 1, "p2p"))
    assert bench.lanes.is_full
    bench.lanes.drop(0)
    assert not bench.lanes.is_full


async def test_close_ends_everything(bench: Bench) -> None:
    ours, _ = bench.put()
    waiting = asyncio.create_task(bench.lanes.get((78, 1, "p2p")))
    await turns(3)
    bench.lanes.close()
    bench.lanes.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ours.fileno() == -1
