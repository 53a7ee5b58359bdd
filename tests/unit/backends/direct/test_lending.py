"""Memory that a sender lends to the receiver's tensor until that is gone."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld import World, WorldConfig
from multiworld.backends import header as wire
from multiworld.backends.arrivals import Description
from multiworld.backends.direct import lending
from multiworld.backends.direct.lane import Lane
from multiworld.backends.direct.lending import (
    LANE_BYTES,
    MARK_BYTES,
    MAX_BLOCKS,
    MAX_LENT_BYTES,
    MIN_LENT_BYTES,
    STEP_BYTES,
    Block,
    Borrowed,
    Lender,
)
from multiworld.backends.dtypes import CODES, memory_of
from multiworld.backends.header import Header, HeaderError
from multiworld.backends.mailbox import Mailbox
from tests.unit.backends.direct.test_shared_memory import (
    Owner,
    is_usable,
    pair,
    parts_of,
    some,
)
from tests.unit.inner_state import lent_blocks

pytestmark = pytest.mark.skipif(not is_usable(), reason="x86-64 Linux only")

LARGE = 3 * STEP_BYTES + 17


def describe(size: int, dtype: torch.dtype = torch.uint8) -> Description:
    shape = (size // dtype.itemsize,)
    return Description(wire.TENSOR, CODES[dtype], shape, size, 0, 0)


@pytest.fixture
def ends() -> tuple[Block, Borrowed]:
    block = Block(0, STEP_BYTES)
    borrowed = Borrowed(os.dup(block.fd), STEP_BYTES)
    block.close_fd()
    return block, borrowed


def test_forked_child_has_a_copy(ends: tuple[Block, Borrowed]) -> None:
    block, borrowed = ends
    block.take()
    block.write(0, memoryview(bytes(200)))
    tensor = borrowed.tensor(describe(200))
    go, gone = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        tensor.fill_(1)
        os.write(go[1], b"x")
        os.read(gone[0], 1)  # now the sender has another message in the block
        is_its_own = bool((tensor == 1).all())
        del tensor
        os._exit(0 if is_its_own else 1)
    os.read(go[0], 1)
    assert bool((tensor == 0).all())
    del tensor
    assert block.is_free
    block.take()
    block.write(0, memoryview(bytes([9]) * 200))
    os.write(gone[1], b"x")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not block.is_free, "the child has freed what it no longer had"
    for end in (*go, *gone):
        os.close(end)


def test_block_is_free_when_the_last_view_of_its_tensor_is_gone(
    ends: tuple[Block, Borrowed],
) -> None:
    block, borrowed = ends
    assert block.is_free
    block.take()
    block.write(0, memoryview(bytes(range(200))))
    tensor = borrowed.tensor(describe(200))
    view = tensor[50:60].view(2, 5)
    array = tensor.numpy()
    del tensor
    assert not block.is_free
    assert view.tolist() == [[50, 51, 52, 53, 54], [55, 56, 57, 58, 59]]
    del view
    assert not block.is_free
    assert array[199] == 199
    del array
    assert block.is_free


def test_tensor_outlives_its_sender_and_its_lane(ends: tuple[Block, Borrowed]) -> None:
    """The kernel keeps the memory as long as a process has it."""
    block, borrowed = ends
    block.take()
    sent = torch.arange(4.0)
    block.write(0, memory_of(sent))
    tensor = borrowed.tensor(describe(16, torch.float32))
    del block, borrowed
    gc.collect()
    assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0]
    tensor += 1.0
    assert tensor.sum() == 10.0


def test_memory_that_is_not_what_was_announced_is_refused() -> None:
    """Access to memory that shrinks would kill this process."""
    unsealed = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, STEP_BYTES + MARK_BYTES)
    with pytest.raises(HeaderError, match="not sealed"):
        Borrowed(unsealed, STEP_BYTES)
    block = Block(0, STEP_BYTES)
    for size in (0, STEP_BYTES - 1, 2 * STEP_BYTES, LANE_BYTES + 1):
        with pytest.raises(HeaderError, match="does not have"):
            Borrowed(os.dup(block.fd), size)
    block.close_fd()


class Announced:
    """A lender whose announcements a test keeps, and takes as the receiver."""

    def __init__(self, *, is_heard: bool = True) -> None:
        self.is_heard = is_heard
        self.borrowed: dict[int, Borrowed] = {}
        self.lender = Lender(self._announce)

    def _announce(self, block: Block) -> bool:
        if self.is_heard:
            self.borrowed[block.number] = Borrowed(os.dup(block.fd), block.size)
        return self.is_heard

    def send(self, size: int) -> torch.Tensor | None:
        """Send a message; return its tensor, or None if no block is free."""
        self.lender.provide(size)
        block = self.lender.take(size)
        if block is None:
            return None
        assert size <= block.size
        return self.borrowed[block.number].tensor(describe(size))


def test_few_blocks_are_used_again_and_again() -> None:
    """The first free block is taken; if none is free, a new one is made."""
    one = Announced()
    first, second = one.send(LARGE), one.send(LARGE)
    assert first is not None
    assert second is not None
    assert len(one.borrowed) == 2
    place = first.data_ptr()
    del first
    for _ in range(10):
        again = one.send(LARGE)
        assert again is not None
        assert again.data_ptr() == place
        del again
    kept = [one.send(LARGE) for _ in range(2 * MAX_BLOCKS)]
    assert sum(tensor is not None for tensor in kept) == MAX_BLOCKS - 1
    one.lender.close()
    assert lending.lent_bytes() == 0


def test_free_blocks_make_room_for_messages_of_another_size() -> None:
    """Free blocks keep neither memory nor numbers that others need."""
    one = Announced()
    limit = MAX_LENT_BYTES
    for size in (limit, MIN_LENT_BYTES, limit // 2, limit // 4, limit // 8) * 3:
        kept = [one.send(size) for _ in range(LANE_BYTES // limit)]
        assert all(t is not None and t.numel() == size for t in kept)
        del kept
    kept = [one.send(limit) for _ in range(LANE_BYTES // limit)]
    assert None not in kept
    assert one.send(MIN_LENT_BYTES) is None
    del kept
    assert one.send(limit + 1) is None
    assert one.send(MIN_LENT_BYTES - 1) is None
    one.lender.close()
    assert lending.lent_bytes() == 0


def test_blocks_of_all_lanes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with many lanes must not lend all its memory."""
    monkeypatch.setattr(lending, "PROCESS_BYTES", 3 * STEP_BYTES)
    lanes = [Announced() for _ in range(5)]
    kept = [lane.send(STEP_BYTES) for lane in lanes]
    assert [tensor is not None for tensor in kept] == [True] * 3 + [False] * 2
    lanes[0].lender.close()
    assert lanes[4].send(STEP_BYTES) is not None
    for lane in lanes:
        lane.lender.close()
    assert lending.lent_bytes() == 0


def test_block_that_could_not_be_announced_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Announced(is_heard=False)
    before = len(os.listdir("/proc/self/fd"))
    assert one.send(LARGE) is None
    one.is_heard = True

    def fails(*_: object) -> int:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(os, "memfd_create", fails)
    assert one.send(LARGE) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert lending.lent_bytes() == 0


def test_what_the_parent_lends_does_not_count_in_a_fork() -> None:
    one = Announced()
    kept = one.send(LARGE)
    pid = os.fork()
    if pid == 0:
        found = [lending.lent_bytes()]
        one.lender.close()
        found.append(lending.lent_bytes())
        two = Announced()
        more = two.send(LARGE)
        found.append(lending.lent_bytes() - LARGE * (more is None))
        os._exit(0 if found[:2] == [0, 0] and found[2] > 0 else 1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert lending.lent_bytes() > 0
    del kept
    one.lender.close()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11)), max_size=60))
def test_no_two_living_tensors_share_memory(steps: list[tuple[int, int]]) -> None:
    one = Announced()
    alive: dict[int, torch.Tensor] = {}
    for number, (steps_of_size, dropped) in enumerate(steps):
        tensor = one.send(steps_of_size * STEP_BYTES - 5)
        if tensor is not None:
            tensor.fill_(number % 251)
            alive[number] = tensor
        for key in sorted(alive)[dropped : dropped + 1]:
            del alive[key]
        tensor = None
        for key, kept in alive.items():
            assert int(kept[0]) == int(kept[-1]) == key % 251
    one.lender.close()


# Lanes.


def blocks_of(world: World) -> int:
    lender = parts_of(world).outbound.lender
    assert lender is not None
    return len(lent_blocks(lender))


async def test_message_without_a_place_is_received_in_lent_memory() -> None:
    """A given tensor gets a copy; either way, the block is used again."""
    async with pair() as (one, two):
        for number in range(20):
            sending = asyncio.ensure_future(one.send(some(LARGE, number), dst=1))
            out = torch.zeros(LARGE, dtype=torch.uint8) if number % 2 else None
            got = await two.recv(out, src=0)
            assert torch.equal(got, some(LARGE, number))
            await sending
            del got
        assert 1 <= blocks_of(one) <= 2


async def test_tensors_that_are_kept_stay_right_and_others_still_arrive() -> None:
    """When no block is left, the ring carries the rest."""
    async with pair() as (one, two):
        kept = []
        for number in range(3 * MAX_BLOCKS):
            sending = asyncio.ensure_future(one.send(some(LARGE, number), dst=1))
            kept.append(await two.recv(src=0))
            await sending
        assert blocks_of(one) == MAX_BLOCKS
        await one.close()
        for number, tensor in enumerate(kept):
            assert torch.equal(tensor, some(LARGE, number))


@pytest.mark.parametrize("is_summed", [False, True])
async def test_bundles_and_held_messages_lie_in_lent_memory_too(
    is_summed: bool,
) -> None:
    """Their tensors share the block; a checksum covers it."""
    config = {"payload_checksum": is_summed}
    async with pair(**config) as (one, two):
        parts = {"a": some(LARGE, 1), "b": torch.ones(3, dtype=torch.bfloat16)}
        await one.send_bundle(parts, dst=1)
        await one.send(some(LARGE, 2), dst=1)
        await one.send(torch.tensor(1), dst=1, tag=1)
        await two.recv(src=0, tag=1)  # the others are held by now
        bundle = await two.recv_bundle(src=0)
        tensor = await two.recv(src=0)
        assert torch.equal(bundle.tensors["a"], some(LARGE, 1))
        assert bundle.tensors["b"].tolist() == [1.0] * 3
        assert torch.equal(tensor, some(LARGE, 2))
        assert blocks_of(one) == 2


async def test_cancelled_send_or_receive_releases_its_block() -> None:
    async with pair() as (one, two):
        size = 30 * STEP_BYTES
        for number in range(3 * MAX_BLOCKS):
            sending = asyncio.ensure_future(one.send(some(size, number), dst=1))
            receiving = asyncio.ensure_future(two.recv(src=0))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            (sending if number % 2 else receiving).cancel()
            await asyncio.wait((sending,))
            await one.send(some(LARGE, number), dst=1)
            while True:
                if receiving.cancelled() or receiving.cancelling():
                    receiving = asyncio.ensure_future(two.recv(src=0))
                got = await receiving
                receiving = asyncio.ensure_future(two.recv(src=0))
                if got.numel() == LARGE:
                    break
            receiving.cancel()
            await asyncio.wait((receiving,))
            assert torch.equal(got, some(LARGE, number))
            del got
        lender = parts_of(one).outbound.lender
        assert lender is not None
        gc.collect()
        assert all(block.is_free for block in lent_blocks(lender))


async def test_collectives_reduce_right_in_lent_memory() -> None:
    """A merged operand is not kept."""
    async with pair() as worlds:
        tensors = [torch.full((2**20,), float(rank + 1)) for rank in range(2)]
        for _ in range(5):
            mine = [tensor.clone() for tensor in tensors]
            await asyncio.gather(
                *(w.all_reduce(t) for w, t in zip(worlds, mine, strict=True))
            )
            assert all(bool((tensor == 3.0).all()) for tensor in mine)


def frame(kind: int, sequence: int, block: int, flags: int, size: int) -> bytes:
    shape = (size,) if kind == wire.TENSOR else ()
    payload = size if kind == wire.TENSOR else 0
    fields = (kind, flags, 0, len(shape), block, 7, sequence, 0, 0, payload, size, 0, 0)
    return wire.encode(Header(*fields), shape)


@pytest.mark.parametrize(
    "what",
    [
        "no descriptor",
        "wrong size",
        "too many",
        "unknown block",
        "too large",
        "empty",
    ],
)
async def test_peer_that_lies_about_lent_memory_is_found_out(what: str) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    owner = Owner()
    before = len(os.listdir("/proc/self/fd"))
    lane = Lane(ours, 1, 7, Mailbox(frozenset({1}), 1 << 20), WorldConfig(), owner)
    block = Block(0, STEP_BYTES)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", block.fd))]
    number = MAX_BLOCKS if what == "too many" else 0
    size = 2 * STEP_BYTES if what == "wrong size" else STEP_BYTES
    lend = frame(wire.LEND, 0, number, wire.LAST, size)
    theirs.sendmsg([lend], [] if what == "no descriptor" else rights)
    flags = wire.LAST | wire.LENT
    used = 3 if what == "unknown block" else 0
    size = {"too large": STEP_BYTES + 1, "empty": 0}.get(what, STEP_BYTES)
    theirs.send(frame(wire.TENSOR, 1, used, flags, size))
    receiving = Mailbox(frozenset({1}), 1 << 20)
    del receiving
    async with asyncio.timeout(5):
        while not owner.has_heard.is_set():
            lane.poll()
            await asyncio.sleep(0)
    assert "memory" in owner.evidence or "block" in owner.evidence, owner.evidence
    lane.close_nowait()
    theirs.close()
    block.close_fd()
    assert len(os.listdir("/proc/self/fd")) == before - 2
