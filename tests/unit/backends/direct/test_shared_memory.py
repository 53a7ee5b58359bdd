"""Large payloads through shared memory: the ring, and lanes that use it."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from multiworld import World, WorldConfig
from multiworld.backends import header as wire
from multiworld.backends.arrivals import Arrival, Description
from multiworld.backends.channel import Channel
from multiworld.backends.direct import backend as backend_module
from multiworld.backends.direct import lane as lane_module
from multiworld.backends.direct import lane_memory, lending, shared_memory
from multiworld.backends.direct.lane import Lane
from multiworld.backends.direct.lane_memory import LaneMemory
from multiworld.backends.direct.lane_socket import LaneSocket
from multiworld.backends.direct.outbound import Outbound
from multiworld.backends.direct.shared_memory import SLOT_BYTES, Ring, Window
from multiworld.backends.header import Header, HeaderError
from multiworld.backends.mailbox import Mailbox
from multiworld.backends.offload import OFFLOAD_BYTES
from multiworld.testing import Arena, no_leaks
from tests.recorded import recorded
from tests.unit.waiting import turns
from tests.until import until


def is_usable() -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return shared_memory.is_usable(sock)


pytestmark = pytest.mark.skipif(not is_usable(), reason="x86-64 Linux only")

LARGE = 3 * SLOT_BYTES + 17


@pytest.fixture(autouse=True)
def nothing_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the ring carry everything large."""
    monkeypatch.setattr(lending, "MIN_LENT_BYTES", 1 << 60)


@pytest.fixture
def ends() -> tuple[Ring, Window]:
    ring = Ring(4)
    window = Window(os.dup(ring.fd), 4)
    ring.close_fd()
    return ring, window


def test_what_is_filled_in_is_there_until_it_is_freed(
    ends: tuple[Ring, Window],
) -> None:
    ring, window = ends
    slots = [ring.fill(memoryview(bytes([number]) * 100)) for number in range(4)]
    assert slots == [0, 1, 2, 3]
    assert not ring.has_room
    assert bytes(window.payload(2, 100)) == b"\2" * 100
    window.free(0)
    assert ring.has_room
    assert ring.fill(memoryview(b"again")) == 0
    ring.close()
    assert bytes(window.payload(0, 5)) == b"again"  # after the sender has closed
    window.close()


def test_bell_rings_once_when_half_is_free(ends: tuple[Ring, Window]) -> None:
    ring, window = ends
    for _ in range(4):
        ring.fill(memoryview(b"x"))
    assert not ring.request_bell()
    assert [window.free(slot) for slot in range(4)] == [False, True, False, False]
    ring.close()
    window.close()


def test_slot_that_holds_nothing_is_refused(ends: tuple[Ring, Window]) -> None:
    ring, window = ends
    for slot, size in ((0, 1), (4, 1), (200, 1)):
        with pytest.raises(HeaderError, match="does not hold a payload"):
            window.payload(slot, size)
    ring.close()
    window.close()


def test_memory_that_could_shrink_is_refused() -> None:
    size = shared_memory.CONTROL_BYTES + 4 * SLOT_BYTES
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, size)
    with pytest.raises(HeaderError, match="not sealed"):
        Window(unsealed, 4)
    small = Ring(2)
    with pytest.raises(HeaderError, match="does not have the size of 4 slots"):
        Window(os.dup(small.fd), 4)
    small.close()
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(HeaderError):
        Window(reading, 4)


@dataclass(frozen=True)
class Parts:
    """The parts of one member's lane to the other."""

    socket: LaneSocket
    outbound: Outbound
    memory: LaneMemory


_parts: dict[World, Parts] = {}


@asynccontextmanager
async def pair(**options: int) -> AsyncIterator[list[World]]:
    """Yield the two members of a world, whose lanes' parts ``parts_of`` returns."""
    config = WorldConfig(join_s=20, **options)  # type: ignore[arg-type]
    async with no_leaks(allow=("asyncio_",)), Arena("direct", config) as arena:
        with (
            recorded(backend_module, Lane) as lanes,
            recorded(lane_module, LaneSocket) as sockets,
            recorded(lane_module, Outbound) as outbounds,
            recorded(lane_module, LaneMemory) as memories,
        ):
            worlds = await arena.world(2)
        parts = map(Parts, sockets, outbounds, memories)
        for lane, its_parts in zip(lanes, parts, strict=True):
            _parts[worlds[1 - lane.rank]] = its_parts
        try:
            yield worlds
        finally:
            _parts.clear()


def parts_of(world: World) -> Parts:
    return _parts[world]


def is_full(world: World) -> bool:
    """Return whether every slot of the world's own ring holds a payload."""
    ring = parts_of(world).outbound.ring
    return ring is not None and not ring.has_room


def is_starving(world: World) -> bool:
    """Return whether a message of the world waits for a slot of its own ring."""
    return parts_of(world).outbound.is_starving


def some(size: int, seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (size,), dtype=torch.uint8, generator=source)


@pytest.mark.parametrize("ring_bytes", [SLOT_BYTES, 2 * SLOT_BYTES, 8 * SLOT_BYTES])
async def test_large_messages_arrive_whole_and_in_order(ring_bytes: int) -> None:
    async with pair(shared_memory_bytes=ring_bytes) as (one, two):
        sizes = [LARGE, 10, 20 * SLOT_BYTES, 0, 200_000, SLOT_BYTES, 70_000]

        async def send() -> None:
            for number, size in enumerate(sizes):
                await one.send(some(size, number), dst=1)

        sending = asyncio.ensure_future(send())
        for number, size in enumerate(sizes):
            out = torch.zeros(size, dtype=torch.uint8) if number % 2 else None
            assert torch.equal(await two.recv(out, src=0), some(size, number))
        await sending
        assert parts_of(one).outbound.ring is not None


async def test_two_that_only_send_at_first_do_not_wait_for_each_other() -> None:
    """Slots become free even if neither side reads further on its socket."""
    async with pair(unexpected_bytes=LARGE) as worlds:

        async def member(me: int) -> None:
            world, other = worlds[me], 1 - me
            receiving = [asyncio.ensure_future(world.recv(src=other)) for _ in range(6)]
            for number in range(6):
                await world.send(some(LARGE, number), dst=other)
            for number, got in enumerate(await asyncio.gather(*receiving)):
                assert torch.equal(got, some(LARGE, number))

        async with asyncio.timeout(30):
            await asyncio.gather(member(0), member(1))


async def test_sender_continues_when_its_own_reading_pauses() -> None:
    """The bell is stuck on the socket behind unread messages, so the sender polls."""
    async with pair(unexpected_bytes=300_000) as (one, two):
        for _ in range(3):  # fills the mailbox of "one", which stops reading
            sending = asyncio.ensure_future(two.send(some(200_000), dst=0, tag=7))
        await until(lambda: not parts_of(one).socket.is_reading)
        large = asyncio.ensure_future(one.send(some(40 * SLOT_BYTES), dst=1))
        async with asyncio.timeout(30):
            assert torch.equal(await two.recv(src=0), some(40 * SLOT_BYTES))
            await large
            for _ in range(3):
                await one.recv(src=1, tag=7)
            await sending


async def test_cancelled_halfway_the_next_message_is_right() -> None:
    async with pair(shared_memory_bytes=2 * SLOT_BYTES) as (one, two):
        for _ in range(5):
            sending = asyncio.ensure_future(one.send(some(30 * SLOT_BYTES), dst=1))
            receiving = asyncio.ensure_future(two.recv(src=0))
            await asyncio.sleep(0.001)  # at any byte, another one each time
            sending.cancel()
            await asyncio.wait((sending,))
            await one.send(some(LARGE, 5), dst=1)
            got = await receiving
            if got.numel() != LARGE:  # the first send completed before its cancelling
                got = await two.recv(src=0)
            assert torch.equal(got, some(LARGE, 5))


async def test_cancelled_before_its_first_slot_nothing_is_withdrawn() -> None:
    """The receiver does not know of the message yet."""
    async with pair(shared_memory_bytes=2 * SLOT_BYTES, unexpected_bytes=0) as worlds:
        one, two = worlds
        first = asyncio.ensure_future(one.send(some(2 * SLOT_BYTES), dst=1))
        await until(lambda: is_full(one))
        for _ in range(3):
            starving = asyncio.ensure_future(one.send(some(LARGE), dst=1))
            await until(lambda: is_starving(one))
            starving.cancel()
            await asyncio.wait((starving,))
        last = asyncio.ensure_future(one.send(some(LARGE, 9), dst=1))
        assert torch.equal(await two.recv(src=0), some(2 * SLOT_BYTES))
        assert torch.equal(await two.recv(src=0), some(LARGE, 9))
        await asyncio.gather(first, last)
        assert one.is_ready
        assert two.is_ready


async def test_starving_sender_has_one_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def call(delay_s: float, *args: Any, **more: Any) -> asyncio.TimerHandle:
        timer = call_later(delay_s, *args, **more)
        timers.extend([timer] if delay_s == lane_memory.LOOK_S else [])
        return timer

    monkeypatch.setattr(loop, "call_later", call)
    async with pair(shared_memory_bytes=2 * SLOT_BYTES, unexpected_bytes=0) as worlds:
        one, two = worlds
        sending = asyncio.ensure_future(one.send(some(40 * SLOT_BYTES), dst=1))
        await until(lambda: is_starving(one))
        for _ in range(20):
            parts_of(one).memory.on_bell()
        await asyncio.sleep(0)
        assert timers
        assert sum(not timer.cancelled() for timer in timers) <= 1
        assert torch.equal(await two.recv(src=0), some(40 * SLOT_BYTES))
        await sending


async def test_receive_cancelled_halfway_loses_nothing() -> None:
    async with pair(shared_memory_bytes=2 * SLOT_BYTES) as (one, two):
        sending = asyncio.ensure_future(one.send(some(LARGE, 2), dst=1))
        out = torch.zeros(LARGE, dtype=torch.uint8)
        receiving = asyncio.ensure_future(two.recv(out, src=0))
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait((receiving,))
        if receiving.cancelled():
            assert torch.equal(await two.recv(src=0), some(LARGE, 2))
        await sending


async def test_without_a_memfd_sockets_carry_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> int:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(os, "memfd_create", fails)
    async with pair() as (one, two):
        sending = asyncio.ensure_future(one.send(some(LARGE), dst=1))
        assert torch.equal(await two.recv(src=0), some(LARGE))
        await sending
        assert parts_of(one).outbound.ring is None


class Owner:
    def __init__(self) -> None:
        self.evidence = ""
        self.has_heard = asyncio.Event()

    def lane_ended(self, rank: int, evidence: str) -> None:
        self.evidence = evidence
        self.has_heard.set()

    def lane_corrupt(self, rank: int, evidence: str) -> None:
        self.evidence = evidence
        self.has_heard.set()

    def lane_finished(self, rank: int) -> None: ...


def frame(
    kind: int, sequence: int, slot: int = 0, flags: int = 0, size: int = 0
) -> bytes:
    header = Header(
        kind, flags, 0, 1 if size else 0, slot, 7, sequence, 0, 0, size, size, 0, 0
    )
    return wire.encode(header, (size,) if size else ())


@pytest.mark.parametrize("what", ["no descriptor", "twice", "a pipe", "empty slot"])
async def test_peer_that_lies_about_memory_is_found_out(what: str) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    owner = Owner()
    before = len(os.listdir("/proc/self/fd"))
    mailbox = Mailbox(frozenset({1}), 1 << 20)
    lane = Lane(ours, 1, 7, mailbox, WorldConfig(), owner)
    ring = Ring(4)
    reading, writing = os.pipe()

    def announce(sequence: int, fds: list[int]) -> None:
        rights = struct.pack(f"{len(fds)}i", *fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if fds else []
        theirs.sendmsg([frame(wire.MEMORY, sequence, 4, wire.LAST)], ancillary)

    announce(0, {"no descriptor": [], "a pipe": [reading]}.get(what, [ring.fd]))
    if what == "twice":
        announce(1, [ring.fd])
    if what == "empty slot":
        flags = wire.LAST | wire.SHARED
        theirs.send(frame(wire.TENSOR, 1, 2, flags, 8))
    async with asyncio.timeout(5):
        await owner.has_heard.wait()
    assert "memory" in owner.evidence or "slot 2" in owner.evidence
    lane.close_nowait()
    theirs.close()
    ring.close()
    os.close(reading)
    os.close(writing)
    assert len(os.listdir("/proc/self/fd")) == before - 2


async def test_receive_that_is_cancelled_twice_returns_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second cancellation comes while the caller's tensor is being copied."""
    arrivals: list[Arrival] = []
    begin = Mailbox.begin

    def noted(*args: Any, **more: Any) -> Arrival | None:
        arrival = begin(*args, **more)
        arrivals.extend([] if arrival is None else [arrival])
        return arrival

    monkeypatch.setattr(Mailbox, "begin", noted)
    size = 16 * OFFLOAD_BYTES
    async with pair(eager_bytes=0) as (one, two):
        data = torch.arange(size // 8)
        receiving = asyncio.ensure_future(two.recv(torch.empty_like(data), src=0))
        await asyncio.sleep(0)
        sending = asyncio.ensure_future(one.send(data, dst=1))
        for _ in range(100_000):
            if any(arrival.received > OFFLOAD_BYTES for arrival in arrivals):
                break
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait((receiving,))
        assert receiving.cancelled()
        async with asyncio.timeout(20):
            assert torch.equal(await two.recv(src=0), data)
            await sending


async def test_what_arrived_is_read_though_nothing_more_can_be_written() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    mailbox = Mailbox(frozenset({1}), 1 << 20)
    lane = Lane(ours, 1, 7, mailbox, WorldConfig(), Owner())
    theirs.send(frame(wire.TENSOR, 0, 0, wire.LAST, 8) + bytes(8))
    theirs.close()
    what = Description(wire.TENSOR, 0, (8,), 8, 0, 0)
    sending = asyncio.ensure_future(lane.send(what, memoryview(b"12345678"), None))
    await turns(2)
    assert not lane.is_dead
    assert not sending.done()
    channel = Channel({1}, 1 << 20)
    channel.mailbox, channel.lanes[1] = mailbox, lane
    channel.member_left(1, lambda: ConnectionError("left"))
    async with asyncio.timeout(5):
        arrival = await channel.wait(
            channel.post(1, 0, lambda *_: None, lambda _: None)
        )
    assert bytes(arrival.memory) == bytes(8)
    with pytest.raises(ConnectionError, match="left"):
        await sending
    lane.close_nowait()


async def test_two_that_leave_with_full_rings_do_not_wait_for_each_other() -> None:
    """A closing lane frees the slots of messages that it will not read."""
    async with pair(
        close_s=30, shared_memory_bytes=4 * SLOT_BYTES, unexpected_bytes=0
    ) as (one, two):
        sends = [
            asyncio.ensure_future(a.send(some(LARGE * 8), dst=b))
            for a, b in ((one, 1), (two, 0))
        ]
        await until(lambda: is_starving(one) and is_starving(two))
        async with asyncio.timeout(5):
            await asyncio.gather(one.close(), two.close())
        await asyncio.gather(*sends, return_exceptions=True)


@pytest.mark.parametrize("way", ["tensor", "bundle", "waiting"])
async def test_memory_of_a_dropped_message_is_used_again(way: str) -> None:
    """The memory is free at once, without the cyclic garbage collector."""
    async with pair() as (one, two):
        data = some(1 << 22)
        places = set()
        gc.disable()
        try:
            for _ in range(10):
                if way == "waiting":
                    receiving = asyncio.ensure_future(two.recv(src=0))
                    await asyncio.sleep(0)
                    await one.send(data, dst=1)
                    tensor = await receiving
                    del receiving
                elif way == "tensor":
                    sending = asyncio.ensure_future(one.send(data, dst=1))
                    tensor = await two.recv(src=0)
                    await sending
                else:
                    sending = asyncio.ensure_future(one.send_bundle({"x": data}, dst=1))
                    tensor = (await two.recv_bundle(src=0)).tensors["x"]
                    await sending
                places.add(tensor.data_ptr())
                del tensor
        finally:
            gc.enable()
        assert len(places) <= 2
