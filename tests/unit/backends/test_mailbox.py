"""Matching of messages and receives, by table and by random histories."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld import MemberLeftError, TensorMismatchError
from multiworld.backends.arrivals import (
    DIMENSION_BYTES,
    MESSAGE_BYTES,
    Arrival,
    Description,
    Receive,
)
from multiworld.backends.dtypes import UINT8
from multiworld.backends.mailbox import Mailbox
from tests.unit.inner_state import held_bytes, waiting_count


def describe(size: int = 4, tag: int = 0) -> Description:
    return Description(0, UINT8, (size,), size, tag, 0)


class Bench:
    def __init__(self, budget: int = 100_000) -> None:
        self.mailbox = Mailbox(frozenset({1, 2}), budget)

    def post(self, source: int | None = 1, tag: int = 0, size: int = 4) -> Receive:
        def check(_: int, found: Description) -> Exception | None:
            return None if found.size == size else TensorMismatchError("size")

        future: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        receive = Receive(source, tag, check, lambda _: None, future)
        self.mailbox.post(receive)
        return receive

    def send(self, source: int, value: int, tag: int = 0, size: int = 4) -> None:
        arrival = self.mailbox.begin(source, describe(size, tag))
        assert arrival is not None
        fill(arrival, value)
        self.mailbox.finish(arrival)


def fill(arrival: Arrival, value: int) -> None:
    arrival.memory[:] = bytes([value]) * len(arrival.memory)
    arrival.received = len(arrival.memory)


def value(receive: Receive) -> int | None:
    """Return the first byte of a receive's message, or None if it has none yet."""
    return receive.future.result().memory[0] if receive.future.done() else None


async def test_messages_and_receives_match_in_order() -> None:
    bench = Bench()
    early = [bench.post(), bench.post()]
    for number in (1, 2, 3):
        bench.send(1, number)
    late = bench.post()
    assert [value(r) for r in (*early, late)] == [1, 2, 3]


async def test_tags_and_sources_do_not_mix() -> None:
    bench = Bench()
    bench.send(1, 1, tag=5)
    bench.send(2, 2, tag=0)
    assert value(bench.post(1, 0)) is None
    assert value(bench.post(1, 5)) == 1
    assert value(bench.post(2, 0)) == 2


async def test_any_source_takes_the_first_to_arrive() -> None:
    """A receive from any source competes with others in call order."""
    bench = Bench()
    bench.send(2, 7)
    bench.send(1, 8)
    assert value(bench.post(None)) == 7
    anyone, named = bench.post(None), bench.post(1)
    assert value(anyone) == 8
    bench.send(1, 9)
    assert value(named) == 9


async def test_mismatch_fails_the_receive_and_keeps_the_message() -> None:
    bench = Bench()
    wrong, right = bench.post(size=9), bench.post(size=4)
    bench.send(1, 3)
    assert isinstance(wrong.future.exception(), TensorMismatchError)
    assert value(right) == 3
    bench.send(1, 4)
    wrong = bench.post(size=9)
    assert isinstance(wrong.future.exception(), TensorMismatchError)
    assert value(bench.post()) == 4


async def test_cancelled_receive_puts_its_message_back_in_place() -> None:
    bench = Bench()
    receive = bench.post()
    arrival = bench.mailbox.begin(1, describe())
    assert arrival is not None
    arrival.memory[:2] = b"\x05\x05"
    arrival.received = 2
    bench.mailbox.cancel(receive)
    arrival.memory[2:] = b"\x05\x05"
    arrival.received = 4
    bench.mailbox.finish(arrival)
    bench.send(1, 6)
    done = bench.post()
    assert value(done) == 5
    bench.mailbox.cancel(done)  # after its message, before the receiver saw it
    assert [value(bench.post()), value(bench.post())] == [5, 6]


async def test_receive_of_a_revoked_message_regains_its_turn() -> None:
    bench = Bench()
    first, second = bench.post(), bench.post()
    arrival = bench.mailbox.begin(1, describe())
    assert arrival is not None
    bench.mailbox.revoke(arrival)
    bench.send(1, 1)
    bench.send(1, 2)
    assert [value(first), value(second)] == [1, 2]


async def test_several_cancelled_receives_put_back_in_order() -> None:
    bench = Bench()
    receives = [bench.post(), bench.post()]
    bench.send(1, 1)
    bench.send(1, 2)
    for receive in receives:
        bench.mailbox.cancel(receive)
    assert [value(bench.post()), value(bench.post())] == [1, 2]


async def test_revoked_message_lets_its_receive_look_again() -> None:
    """A receive from any source then takes a message of another one."""
    bench = Bench()
    anyone = bench.post(None)
    arrival = bench.mailbox.begin(1, describe())
    assert arrival is not None
    bench.send(2, 7)
    bench.mailbox.revoke(arrival)
    assert value(anyone) == 7


async def test_end_of_a_source_fails_the_receive_of_its_unfinished_message() -> None:
    bench = Bench()
    receive = bench.post()
    bench.mailbox.begin(1, describe())
    bench.mailbox.begin(1, describe(tag=3))
    bench.mailbox.end(1, lambda rank: MemberLeftError("left", rank=rank))
    assert isinstance(receive.future.exception(), MemberLeftError)
    assert isinstance(bench.post(1, 3).future.exception(), MemberLeftError)
    assert held_bytes(bench.mailbox) == 0


async def test_message_that_does_not_fit_in_memory_leaves_its_receive_posted() -> None:
    bench = Bench()
    receive = bench.post(size=1 << 62)
    with pytest.raises(MemoryError):
        bench.mailbox.begin(1, describe(size=1 << 62))
    bench.mailbox.abort(lambda: RuntimeError("over"))
    assert receive.future.exception() is not None


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("is_all", [False, True])
async def test_tensor_of_a_failed_receive_is_its_callers_again(
    is_all: bool, is_reduced: bool
) -> None:
    """Its connection may stay open, and the rest of its message may arrive."""
    mailbox = Mailbox(frozenset({1, 2}), 100_000)
    out = torch.zeros(4, dtype=torch.uint8)
    future: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
    merge = (lambda at, part: None) if is_reduced else None
    receive = Receive(1, 0, lambda *_: None, lambda _: out, future, merge)
    mailbox.post(receive)
    arrival = mailbox.begin(1, describe())
    assert arrival is not None
    arrival.received = 2
    if is_all:
        mailbox.abort(lambda: MemberLeftError("left", rank=2))
    else:
        mailbox.end(1, lambda rank: MemberLeftError("left", rank=rank))
    assert isinstance(receive.error, MemberLeftError)
    assert arrival.merge is None
    fill(arrival, 7)
    mailbox.finish(arrival)
    assert out.tolist() == [0, 0, 0, 0]


async def test_message_after_one_that_failed_is_not_received() -> None:
    """Else a message would be missing, and nobody would notice."""
    bench = Bench()
    first = bench.post()
    arrival = bench.mailbox.begin(1, describe())
    assert arrival is not None
    bench.mailbox.end(1, lambda rank: MemberLeftError("left", rank=rank))
    bench.mailbox.finish(arrival)
    bench.send(1, 2)
    for receive in (first, bench.post()):
        assert isinstance(receive.error, MemberLeftError)
        assert bench.mailbox.earlier(receive) is None


async def test_budget_stalls_until_a_receive_makes_room() -> None:
    bench = Bench(budget=2 * (4 + MESSAGE_BYTES + DIMENSION_BYTES))
    bench.send(1, 1)
    bench.send(1, 2)
    assert bench.mailbox.begin(1, describe()) is None
    assert bench.mailbox.begin(2, describe()) is not None
    room: list[bool] = []
    bench.mailbox.stall(1, lambda: room.append(True))
    assert value(bench.post()) == 1
    assert room == [True]
    assert bench.mailbox.begin(1, describe()) is not None


async def test_end_of_a_source_comes_behind_its_messages() -> None:
    bench = Bench()
    bench.send(1, 1)
    bench.mailbox.end(1, lambda rank: MemberLeftError("left", rank=rank))
    assert value(bench.post()) == 1
    assert isinstance(bench.post().future.exception(), MemberLeftError)
    anyone = bench.post(None)
    assert not anyone.future.done()
    bench.mailbox.end(2, lambda rank: MemberLeftError("left", rank=rank))
    assert isinstance(anyone.future.exception(), MemberLeftError)


async def test_abort_fails_everything_now_and_later() -> None:
    bench = Bench()
    waiting, served = bench.post(tag=1), bench.post()
    bench.mailbox.begin(1, describe())
    bench.mailbox.abort(lambda: RuntimeError("over"))
    for receive in (waiting, served, bench.post()):
        assert isinstance(receive.future.exception(), RuntimeError)
    assert waiting_count(bench.mailbox) == 0


async def test_handler_gets_held_tensors_and_then_those_that_arrive() -> None:
    """The budget counts none of them."""
    bench = Bench(budget=2 * (4 + MESSAGE_BYTES + DIMENSION_BYTES))
    got: list[int] = []
    room: list[bool] = []
    bench.send(1, 1)
    unfinished = bench.mailbox.begin(1, describe())
    assert unfinished is not None
    assert bench.mailbox.begin(1, describe()) is None
    bench.mailbox.stall(1, lambda: room.append(True))
    bench.mailbox.handle(1, 0, lambda tensor: got.append(int(tensor[0])))
    assert (got, room, held_bytes(bench.mailbox)) == ([1], [True], 0)
    fill(unfinished, 2)
    bench.mailbox.finish(unfinished)
    for number in range(3, 7):
        bench.send(1, number)
    bench.send(2, 50)
    bench.send(1, 60, tag=1)
    assert got == [1, 2, 3, 4, 5, 6]
    assert value(bench.post(2)) == 50
    assert value(bench.post(1, tag=1)) == 60


async def test_handler_leaves_messages_of_other_kinds_to_receives() -> None:
    """A held message stays in its place, and so does what came after it."""
    bench = Bench()
    got: list[int] = []
    bundle = Description(1, UINT8, (4,), 4, 0, 0)
    for description in (bundle, describe()):
        arrival = bench.mailbox.begin(1, description)
        assert arrival is not None
        fill(arrival, 7)
        bench.mailbox.finish(arrival)
    bench.mailbox.handle(1, 0, lambda tensor: got.append(int(tensor[0])))
    bench.send(1, 8)
    assert got == [7, 8]
    assert value(bench.post()) == 7


steps = st.lists(
    st.tuples(st.sampled_from(["post", "any", "send", "cancel"]), st.integers(0, 5)),
    max_size=40,
)


@settings(deadline=None)
@given(steps)
def test_any_history_then_every_message_is_received_once_and_in_order(
    history: list[tuple[str, int]],
) -> None:
    async def play() -> None:
        bench = Bench()
        receives: list[Receive] = []
        sent: dict[int, list[int]] = {1: [], 2: []}
        for kind, number in history:
            source = 1 + number % 2
            if kind == "post":
                receives.append(bench.post(source))
            elif kind == "any":
                receives.append(bench.post(None))
            elif kind == "send":
                sent[source].append(len(sent[1]) + len(sent[2]))
                bench.send(source, sent[source][-1])
            elif number < len(receives) and not receives[number].future.done():
                bench.mailbox.cancel(receives.pop(number))
        for source in (1, 2):
            receives += [bench.post(source) for _ in sent[source]]
        got: dict[int, list[int]] = {1: [], 2: []}
        for receive in receives:
            if receive.future.done():
                arrival: Any = receive.future.result()
                got[arrival.source].append(arrival.memory[0])
        assert {s: sorted(v) for s, v in got.items()} == sent

    asyncio.run(play())
