"""Both halves of a lane, byte by byte: cancel, break and damage at every position."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multiworld.backends import header as wire
from multiworld.backends.arrivals import (
    DIMENSION_BYTES,
    MESSAGE_BYTES,
    Arrival,
    Description,
    Receive,
)
from multiworld.backends.direct.inbound import Inbound
from multiworld.backends.direct.outbound import Outbound, Outgoing
from multiworld.backends.dtypes import code_of, memory_of
from multiworld.backends.header import FRAGMENT_BYTES, HeaderError
from multiworld.backends.mailbox import Mailbox
from tests.unit.inner_state import held_bytes, is_clean

NONCE = 77
BUDGET = 4 * FRAGMENT_BYTES


class Sender:
    def __init__(self, *, is_summed: bool = False) -> None:
        self.outbound = Outbound(NONCE, is_summed=is_summed)
        self.written = bytearray()

    def put(self, tensor: Tensor, tag: int = 0) -> Outgoing:
        memory = memory_of(tensor)
        shape = tuple(tensor.shape)
        description = Description(
            wire.TENSOR, code_of(tensor), shape, len(memory), tag, 0
        )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        message = Outgoing(description, memory, tensor, future)
        self.outbound.put(message)
        return message

    def write(self, limit: int | None = None) -> bytes:
        """Write up to ``limit`` bytes, or all; return them."""
        begin = len(self.written)
        while limit is None or len(self.written) - begin < limit:
            chunks = self.outbound.chunks()
            if not chunks:
                break
            room = None if limit is None else limit - (len(self.written) - begin)
            data = b"".join(chunks)[:room]
            self.written += data
            self.outbound.advance(len(data))
        return bytes(self.written[begin:])


class Receiver:
    def __init__(self, budget: int = BUDGET) -> None:
        self.mailbox = Mailbox(frozenset({1}), budget)
        self.fins = 0
        self.inbound = Inbound(
            1,
            NONCE,
            self.mailbox,
            max_message_bytes=1 << 30,
            on_fin=self._on_fin,
        )

    def _on_fin(self) -> None:
        self.fins += 1

    def read(self, data: bytes, step: int | None = None) -> int:
        """Read ``data``, ``step`` bytes at a time; return the number of bytes read."""
        taken = 0
        while taken < len(data) and not self.inbound.is_stalled:
            if self.inbound.is_finished:
                break
            count = 0
            for buffer in self.inbound.buffers():
                room = len(data) - taken - count
                if step is not None:
                    room = min(room, step - count)
                part = data[taken + count :][: min(room, len(buffer))]
                buffer[: len(part)] = part
                count += len(part)
            self.inbound.advance(count)
            taken += count
            while self.inbound.is_held:  # as the lane does after a few turns
                self.inbound.retry()
        return taken

    def post(self, out: Tensor | None = None) -> Receive:
        future: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        receive = Receive(1, 0, lambda *_: None, lambda _: out, future)
        self.mailbox.post(receive)
        return receive


def got(receive: Receive) -> Tensor:
    return receive.future.result().tensor


def content(size: int) -> Tensor:
    """Return bytes that differ by position."""
    return (torch.arange(size) * 31 % 251).to(torch.uint8)


@pytest.mark.parametrize("step", [1, 2, 7, 63, 64, 65, 1000, None])
@pytest.mark.parametrize("is_summed", [False, True])
async def test_stream_when_cut_anywhere_then_messages_are_whole(
    step: int | None, is_summed: bool
) -> None:
    sender, receiver = Sender(is_summed=is_summed), Receiver()
    tensors = [content(5), torch.tensor(1.5), torch.empty(0, 3), content(3000)]
    tensors.append(torch.ones(2, 3, dtype=torch.bfloat16))
    for tensor in tensors:
        sender.put(tensor)
    sender.outbound.put_fin()
    receives = [receiver.post() for _ in tensors]
    data = sender.write()
    assert receiver.read(data, step) == len(data)
    for receive, tensor in zip(receives, tensors, strict=True):
        assert torch.equal(got(receive), tensor)
        assert got(receive).dtype == tensor.dtype
        assert got(receive).shape == tensor.shape
    assert receiver.fins == 1
    assert is_clean(receiver.inbound)


async def test_large_message_goes_straight_into_its_tensor() -> None:
    sender, receiver = Sender(), Receiver()
    tensor, out = content(3 * FRAGMENT_BYTES + 17), torch.zeros(0)
    out = torch.zeros(tensor.numel(), dtype=torch.uint8)
    receive = receiver.post(out)
    sender.put(tensor)
    receiver.read(sender.write(), 10_007)
    assert got(receive) is out
    assert torch.equal(out, tensor)


async def test_receive_when_cancelled_at_every_byte_then_nothing_is_lost() -> None:
    message, behind = content(200), content(9)
    sender = Sender()
    sender.put(message)
    sender.put(behind)
    data = sender.write()
    for position in range(len(data) + 1):
        for with_out in (False, True):
            receiver = Receiver()
            out = torch.zeros(200, dtype=torch.uint8) if with_out else None
            receive = receiver.post(out)
            receiver.read(data[:position])
            receiver.mailbox.cancel(receive)
            again = [receiver.post(), receiver.post()]
            receiver.read(data[position:])
            assert torch.equal(got(again[0]), message)
            assert torch.equal(got(again[1]), behind)


async def test_send_when_cancelled_at_every_byte_then_all_or_nothing() -> None:
    """The tensor may be overwritten at once."""
    for position in range(64 + 8 + 100 + 3):
        sender, receiver = Sender(), Receiver()
        tensor = content(100)
        message = sender.put(tensor)
        sender.write(position)
        sender.outbound.withdraw(message)
        tensor.fill_(0)
        sender.put(content(7))
        sender.write()
        receives = [receiver.post(), receiver.post()]
        receiver.read(bytes(sender.written), 13)
        arrived = [got(r) for r in receives if r.future.done()]
        expected = [content(7)] if position == 0 else [content(100), content(7)]
        assert len(arrived) == len(expected), position
        for one, other in zip(arrived, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("fragments", [1, 2])
async def test_large_send_when_cancelled_then_rest_is_called_off(
    fragments: int,
) -> None:
    size = 4 * FRAGMENT_BYTES
    frame = FRAGMENT_BYTES + 64
    for offset in (-65, -64, -1, 0, 1, 63, 64, 65, 80):
        sender, receiver = Sender(), Receiver()
        tensor = content(size)
        out = torch.zeros(size, dtype=torch.uint8)
        receive = receiver.post(out)
        message = sender.put(tensor)
        sender.write(fragments * frame + 8 + offset)
        sender.outbound.withdraw(message)
        tensor.fill_(0)
        sender.put(content(size) + 1)
        sender.write()
        receiver.read(bytes(sender.written), 50_000)
        assert torch.equal(got(receive), content(size) + 1), offset
        assert is_clean(receiver.inbound)


async def test_stream_when_it_ends_at_every_byte_then_message_is_not_delivered() -> (
    None
):
    sender = Sender()
    sender.put(content(100))
    data = sender.write()
    for position in range(len(data)):
        receiver = Receiver()
        receive = receiver.post()
        receiver.read(data[:position], 11)
        assert not receive.future.done()
        receiver.mailbox.abort(lambda: RuntimeError("broken"))
        assert isinstance(receive.future.exception(), RuntimeError)


async def test_header_when_damaged_at_every_bit_then_lane_is_refused() -> None:
    sender = Sender()
    sender.put(content(16))
    data = sender.write()
    for bit in range((64 + 8) * 8):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        receiver = Receiver()
        receive = receiver.post()
        try:
            receiver.read(bytes(bad))
        except HeaderError:
            pass
        assert not receive.future.done(), bit


async def test_payload_when_damaged_and_summed_then_lane_is_refused() -> None:
    sender = Sender(is_summed=True)
    sender.put(content(64))
    data = bytearray(sender.write())
    data[-1] ^= 1
    receiver = Receiver()
    receiver.post()
    with pytest.raises(HeaderError, match="checksum"):
        receiver.read(bytes(data))


def _frame(extents: tuple[int, ...] = (4,), **changes: int) -> bytes:
    fields = {
        "kind": wire.TENSOR,
        "flags": wire.LAST,
        "dtype": 0,
        "ndim": len(extents),
        "slot": 0,
        "nonce": NONCE,
        "sequence": 0,
        "tag": 0,
        "fragment": 0,
        "payload": 4,
        "size": 4,
        "label": 0,
        "payload_sum": 0,
    }
    header = wire.Header(**{**fields, **changes})
    return wire.encode(header, extents if header.ndim else ()) + b"\1\2\3\4"


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": 78},
        {"sequence": 1},
        {"kind": 9},
        {"dtype": 200},
        {"extents": (5,)},
        {"size": 1 << 40, "extents": (1 << 40,)},
        {"payload": FRAGMENT_BYTES + 1},
        {"payload": 8},
        {"payload": 2},
        {"fragment": 1},
        {"kind": wire.WITHDRAW},
        {"kind": wire.MEMORY},
        {"kind": wire.BELL},
        {"flags": wire.LAST | wire.SHARED},
        {"kind": wire.BUNDLE, "label": 5, "ndim": 0},
        {"kind": wire.OBJECT, "dtype": 3, "ndim": 0},
        {"kind": wire.OBJECT},
        {"extents": (2**64 - 1, 0), "size": 0, "payload": 0},
        {"extents": (2**62, 2**62, 0), "size": 0, "payload": 0},
        {"kind": wire.OBJECT, "extents": (2**63, 0), "size": 0, "payload": 0},
    ],
    ids=str,
)
async def test_frame_when_it_lies_then_lane_is_refused(changes: dict[str, Any]) -> None:
    """A peer cannot make a receiver allocate, skip or mix up messages."""
    receiver = Receiver()
    receive = receiver.post()
    with pytest.raises(HeaderError):
        receiver.read(_frame(**changes))
    assert not receive.future.done()


async def test_fin_in_the_middle_of_a_message_is_refused() -> None:
    """A lane closes between messages only."""
    sender, receiver = Sender(), Receiver()
    sender.put(content(2 * FRAGMENT_BYTES))
    receiver.post()
    receiver.read(sender.write(FRAGMENT_BYTES + 72))
    fin = wire.Header(wire.FIN, wire.LAST, 0, 0, 0, NONCE, 1, 0, 0, 0, 0, 0, 0)
    with pytest.raises(HeaderError, match="fin"):
        receiver.read(wire.encode(fin))


async def test_budget_when_spent_then_reading_stops_and_resumes() -> None:
    """A message without room stops the lane after its header."""
    sender, receiver = (
        Sender(),
        Receiver(budget=2 * (100 + MESSAGE_BYTES + DIMENSION_BYTES) + 9),
    )
    for _ in range(3):
        sender.put(content(100))
    data = sender.write()
    receiver.read(data)
    assert receiver.inbound.is_stalled
    assert held_bytes(receiver.mailbox) == 2 * (100 + MESSAGE_BYTES + DIMENSION_BYTES)
    assert torch.equal(got(receiver.post()), content(100))
    assert receiver.inbound.retry()
    for _ in range(2):
        assert torch.equal(got(receiver.post()), content(100))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_interleaving_then_what_was_not_withdrawn_arrives_in_order(
    data: st.DataObject,
) -> None:
    async def play() -> None:
        sender, receiver = Sender(), Receiver(1 << 40)
        sent: list[tuple[Outgoing, int]] = []
        withdrawn: set[int] = set()
        receives: list[Receive] = []
        kinds = st.sampled_from(["send", "withdraw", "write", "post", "cancel"])
        for _ in range(data.draw(st.integers(1, 25))):
            match data.draw(kinds):
                case "send":
                    size = data.draw(st.sampled_from([1, 50, FRAGMENT_BYTES + 9]))
                    tensor = torch.full((size,), len(sent), dtype=torch.uint8)
                    sent.append((sender.put(tensor), len(sent)))
                case "withdraw" if sent:
                    message, number = data.draw(st.sampled_from(sent))
                    future = message.future
                    if future is not None and not future.done():
                        sender.outbound.withdraw(message)
                        withdrawn.add(number)
                case "write":
                    part = sender.write(data.draw(st.integers(1, 400_000)))
                    receiver.read(part, data.draw(st.integers(30, 70_000)))
                case "post":
                    receives.append(receiver.post())
                case "cancel" if receives:
                    receive = data.draw(st.sampled_from(receives))
                    if not receive.future.done():
                        receives.remove(receive)
                        receiver.mailbox.cancel(receive)
        receiver.read(sender.write())
        receives += [receiver.post() for _ in sent]
        values = [int(got(r)[0]) for r in receives if r.future.done()]
        for receive in receives:
            if receive.future.done():
                tensor = got(receive)
                assert bool((tensor == tensor[0]).all())
        assert values == sorted(set(values))
        assert set(values) >= {n for _, n in sent} - withdrawn

    asyncio.run(play())
