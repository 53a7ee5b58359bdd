"""A channel's receives: spinning, parking, cancelling, and lanes that end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from multiworld.backends import channel as channel_module
from multiworld.backends.arrivals import Arrival, Description, Receive
from multiworld.backends.base import ErrorMaker
from multiworld.backends.channel import TURN_MESSAGES, Channel
from multiworld.backends.dtypes import UINT8
from multiworld.backends.spin import Spin
from tests.unit.waiting import turns


def describe(tag: int = 0) -> Description:
    return Description(0, UINT8, (1,), 1, tag, 0)


class Lane:
    """A fake lane whose messages the test delivers."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank, self._channel = rank, channel
        self.is_finished = self.is_dead = self.is_held = self.is_arriving = False
        self.queue: list[int] = []
        self.polls, self.calls = 0, list[str]()
        self.holds: Description | None = None

    def arrive(self, value: int) -> None:
        arrival = self._channel.mailbox.begin(self.rank, describe())
        assert arrival is not None
        arrival.memory[:] = bytes([value])
        arrival.received = 1
        self._channel.mailbox.finish(arrival)

    def poll(self) -> None:
        self.polls += 1
        if self.queue:
            self.arrive(self.queue.pop(0))

    def held(self, tag: int) -> Description | None:
        return self.holds if self.holds and self.holds.tag == tag else None

    def take(self, memory: memoryview) -> None:
        self.holds = None

    async def send(self, *_: Any) -> None:
        raise NotImplementedError

    async def give_way(self) -> None:
        await asyncio.sleep(0)

    def fail_sends(self, make_error: ErrorMaker) -> None:
        self.calls.append(f"fail {make_error()}")

    async def paused(self, call: Callable[[], object]) -> None:
        call()

    def begin_close(self, make_error: ErrorMaker) -> None:
        self.calls.append("begin_close")

    async def wait_drained(self) -> None:
        pass

    def finish_close(self, linger_s: float) -> bool:
        return False

    def take_in(self) -> None:
        self.calls.append("take_in")

    def abort(self, make_error: ErrorMaker) -> None:
        self.calls.append(f"abort {make_error()}")

    def close_nowait(self) -> None:
        self.calls.append("close")

    async def wait_closed(self) -> None:
        pass

    def fileno(self) -> int:
        return -1 if self.is_dead else 40 + self.rank


class Bench:
    def __init__(self) -> None:
        self.channel = Channel([1, 2], 10_000)
        self.lanes = {rank: Lane(rank, self.channel) for rank in (1, 2)}
        self.channel.lanes.update(self.lanes)

    def post(self, source: int | None = 1) -> Receive:
        return self.channel.post(source, 0, lambda *_: None, lambda _: None)

    async def recv(self, source: int | None = 1) -> int:
        return value(await self.channel.wait(self.post(source)))


def value(arrival: Arrival) -> int:
    return int(arrival.memory[0])


def gone() -> Exception:
    return ConnectionError("gone")


async def test_message_that_has_arrived_is_taken_at_once() -> None:
    bench = Bench()
    bench.lanes[1].arrive(5)
    assert await bench.recv() == 5
    assert bench.lanes[1].polls == 0


async def test_receive_polls_only_the_lanes_that_could_bring_its_message() -> None:
    bench = Bench()
    bench.lanes[1].queue = [7]
    assert await bench.recv(1) == 7
    assert bench.lanes[2].polls == 0
    bench.lanes[2].queue = [8]
    assert await bench.recv(None) == 8


def parked_in_a_fork() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(channel_module.Channel.parked)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def test_receive_parks_until_the_message_comes() -> None:
    """While one receive is parked, no other one spins."""
    bench = Bench()
    waiting = asyncio.create_task(bench.recv())
    await turns(3)
    assert parked_in_a_fork() == 0  # nothing ends its wait there
    assert channel_module.Channel.parked == 1
    bench.lanes[1].arrive(9)
    assert await waiting == 9
    assert channel_module.Channel.parked == 0


async def test_receive_spins_after_a_short_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Spin, "seconds", 20.0)
    bench = Bench()
    lane = bench.lanes[1]

    def poll() -> None:
        lane.polls += 1
        if lane.polls == 50:
            lane.arrive(3)

    lane.poll = poll  # type: ignore[method-assign]
    assert await bench.recv() == 3
    assert lane.polls == 50


async def test_cancelled_receive_returns_its_message() -> None:
    bench = Bench()
    for value_ in (1, 2):
        waiting = asyncio.create_task(bench.recv())
        await turns(3)
        if value_ == 1:
            bench.lanes[1].arrive(value_)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if value_ == 2:
            bench.lanes[1].arrive(value_)
        assert waiting.cancelled()
        assert await bench.recv() == value_
        assert channel_module.Channel.parked == 0


async def test_stream_of_messages_lets_other_tasks_run() -> None:
    """A receive that never has to wait still yields now and then."""
    bench = Bench()
    ran = asyncio.create_task(asyncio.sleep(0))
    for number in range(TURN_MESSAGES):
        assert not ran.done()
        bench.lanes[1].arrive(number % 256)
        await bench.recv()
    await asyncio.sleep(0)
    assert ran.done()


async def test_message_held_by_its_lane_is_described_not_copied() -> None:
    """The caller copies it from the lane's buffer, unless another one is before it."""
    bench = Bench()
    lane = bench.lanes[1]
    lane.holds, lane.is_held = describe(), True
    assert bench.channel.next_from(1, 0) == describe()
    assert bench.channel.next_from(1, 5) is None
    assert bench.channel.next_from(3, 0) is None
    receive = bench.post()
    assert bench.channel.next_from(1, 0) is None
    bench.channel.mailbox.cancel(receive)
    assert bench.channel.next_from(1, 0) == describe()


async def test_member_that_left_fails_what_it_cannot_complete() -> None:
    """While its lane may still bring messages, receives wait for them."""
    bench = Bench()
    waiting = asyncio.create_task(bench.recv(1))
    await turns(3)
    bench.channel.member_left(1, gone)
    assert bench.lanes[1].calls == ["fail gone"]
    await turns(3)
    assert not waiting.done()
    bench.lanes[1].is_dead = True
    bench.channel.member_left(1, gone)
    with pytest.raises(ConnectionError):
        await waiting
    assert bench.lanes[2].calls == []


async def test_member_without_a_lane_has_sent_nothing() -> None:
    bench = Bench()
    del bench.channel.lanes[1]
    waiting = asyncio.create_task(bench.recv(1))
    await turns(3)
    bench.channel.member_left(1, gone)
    for receiving in (waiting, bench.recv(1)):
        with pytest.raises(ConnectionError):
            await receiving


@pytest.mark.parametrize(
    ("method", "calls"), [("end", ["fail gone"]), ("abort", ["take_in", "abort gone"])]
)
async def test_end_fails_every_receive_now_and_later(
    method: str, calls: list[str]
) -> None:
    """``abort`` also closes the lanes, after it has read what has arrived."""
    bench = Bench()
    waiting = [asyncio.create_task(bench.recv(source)) for source in (1, 2, None)]
    await turns(3)
    getattr(bench.channel, method)(gone)
    waiting.append(asyncio.create_task(bench.recv(1)))
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(error) for error in found] == [ConnectionError] * 4
    assert [lane.calls for lane in bench.lanes.values()] == [calls] * 2
