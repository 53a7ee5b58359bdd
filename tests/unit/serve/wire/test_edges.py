"""Edges: outboxes that send in order, and a keeper that opens, leaves and reopens."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from multiworld.config import WorldConfig
from multiworld.errors import WorldBrokenError
from multiworld.serve.wire import edges as module
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.edges import Edges, Outbox, OutboxFullError
from multiworld.serve.wire.frames import Entry, unpack
from multiworld.serve.wire.inference_messages import AnswerItem, Answers, Cancel
from multiworld.serve.wire.protocol import FRAMES
from multiworld.serve.wire.routing_table import Edge
from multiworld.testing import Arena
from multiworld.world.manager import WorldManager
from multiworld.world.world import World
from tests.unit.serve.edges import HANG_S, break_world, settle, until

_numbers = itertools.count()

EDGE = Edge("edge:g>a", "a", 0, is_upstream=False)
RENDEZVOUS = WorldConfig(join_s=20, eager_bytes=0)
"""Configuration with which every send waits for its receive."""


def cancel(number: int) -> Cancel:
    return Cancel(("g", number, 1))


def number_of(message: EdgeMessage) -> int:
    assert isinstance(message, Cancel)
    return message.key[1]


async def frame(world: World) -> list[int]:
    """Receive one frame; return the numbers of its messages."""
    async with asyncio.timeout(HANG_S):
        packed = await world.recv(src=0, tag=FRAMES)
    return [number_of(message) for message, _ in unpack(packed)]


# Outboxes.


async def test_messages_of_one_turn_of_the_loop_go_in_one_frame() -> None:
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        outbox = Outbox(EDGE, left)
        for number in range(3):
            outbox.put(cancel(number))
        assert not outbox.is_idle
        await asyncio.wait_for(outbox.wait_sent(), HANG_S)
        outbox.put(cancel(3))
        await settle()
        assert outbox.is_idle
        assert [await frame(right), await frame(right)] == [[0, 1, 2], [3]]


async def test_flush_sends_at_once() -> None:
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        outbox = Outbox(EDGE, left)
        for number in range(2):
            outbox.put(cancel(number))
            outbox.flush()
            assert outbox.is_idle
        assert [await frame(right), await frame(right)] == [[0], [1]]


@pytest.mark.parametrize(
    ("limit", "value"), [("FRAME_MESSAGES", 2), ("FRAME_BYTES", 8)]
)
async def test_frame_is_bounded(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(module, limit, value)
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        outbox = Outbox(EDGE, left)
        for number in range(5):
            answer = Answers((AnswerItem((number, 1)),))
            outbox.put(answer, [{"x": torch.ones(1)}])
        outbox.flush()
        counts = [len(unpack(await right.recv(src=0, tag=FRAMES))) for _ in range(3)]
        assert counts == [2, 2, 1]


async def test_order_is_kept_while_something_waits() -> None:
    async with Arena("memory", RENDEZVOUS) as arena:
        left, right = await arena.world(2)
        outbox = Outbox(EDGE, left)
        sending = asyncio.ensure_future(outbox.run())
        outbox.put(cancel(0))
        outbox.flush()
        for number in range(1, 4):
            outbox.put(cancel(number))
        waiting = asyncio.ensure_future(outbox.wait_sent())
        await settle()
        assert not outbox.is_idle
        assert not waiting.done()
        assert [await frame(right), await frame(right)] == [[0], [1, 2, 3]]
        await asyncio.wait_for(waiting, HANG_S)
        assert outbox.is_idle
        sending.cancel()


class SlowWorld:
    def __init__(self, count: int) -> None:
        self.begun: list[list[int]] = []
        self.gates = [asyncio.Event() for _ in range(count)]

    async def send(self, packed: Tensor, *, dst: int, tag: int) -> None:
        self.begun.append([number_of(message) for message, _ in unpack(packed)])
        await self.gates[len(self.begun) - 1].wait()


async def test_nothing_is_begun_before_what_was_put_in_first_is_sent() -> None:
    """A later message would reach its peer without the earlier one."""
    slow = SlowWorld(3)
    world: Any = slow
    outbox = Outbox(EDGE, world)
    sending = asyncio.ensure_future(outbox.run())
    for number in range(3):
        await settle()
        assert slow.begun == [[n] for n in range(number)]
        outbox.put(cancel(number))
        outbox.flush()
        outbox.flush()
        assert slow.begun == [[n] for n in range(number + 1)]
        slow.gates[number].set()
    await asyncio.wait_for(outbox.wait_sent(), HANG_S)
    assert outbox.is_idle
    sending.cancel()


async def test_tensors_arrive_with_their_message() -> None:
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        outbox = Outbox(EDGE, left)
        outbox.put(cancel(0))
        answers = Answers((AnswerItem((1, 2)), AnswerItem((3, 1))))
        large = torch.arange(10**5)
        outbox.put(answers, [{"x": torch.tensor([5.0])}, {"y": large}])
        outbox.put(cancel(1))
        sending = asyncio.ensure_future(outbox.run())
        first, second, third = unpack(await right.recv(src=0, tag=FRAMES))
        assert [number_of(first[0]), number_of(third[0])] == [0, 1]
        assert (first[1], second[0], third[1]) == ([], answers, [])
        assert second[1][0]["x"].tolist() == [5.0]
        assert torch.equal(second[1][1]["y"], large)
        sending.cancel()


async def test_send_that_fails_is_raised_where_the_end_is_waited_for() -> None:
    """The sender continues until the keeper reports the end of the edge."""
    async with Arena("memory") as arena:
        left, _ = await arena.world(2)
        outbox = Outbox(EDGE, left)
        await break_world(left)
        outbox.put(cancel(1))
        outbox.flush()
        outbox.put(cancel(2))
        with pytest.raises(WorldBrokenError):
            await asyncio.wait_for(outbox.run(), HANG_S)
        assert outbox.silent_s() == 0.0


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_full_outbox_fails_the_edge(
    monkeypatch: pytest.MonkeyPatch, is_stuck: bool
) -> None:
    """Losing one message would be worse."""
    monkeypatch.setattr(module, "OUTBOX_LIMIT", 2)
    async with Arena("memory", config=RENDEZVOUS) as arena:
        left, _ = await arena.world(2)
        outbox = Outbox(EDGE, left)
        running = asyncio.ensure_future(outbox.run())
        if is_stuck:
            outbox.put(cancel(9))
            outbox.flush()  # nobody receives it
            await settle()
        for number in range(4):
            outbox.put(cancel(number))
        with pytest.raises(OutboxFullError, match="2 messages are queued"):
            await asyncio.wait_for(running, HANG_S)
        outbox.put(cancel(5))
        assert outbox.is_idle


# The keeper.


class MemoryManager(WorldManager):
    """Manager that keeps worlds on the memory backend, after raising ``failures``."""

    failures: list[Exception]
    kept = 0

    def keep(self, name: str, **options: Any) -> AsyncIterator[World]:
        self.kept += 1
        if self.failures:
            raise self.failures.pop(0)
        return super().keep(name, **{**options, "backend": "memory"})


class FakeOwner:
    def __init__(self) -> None:
        self.ups: list[Outbox] = []
        self.downs: list[tuple[str, bool]] = []
        self.got: list[int] = []
        self.failures: list[Exception] = []

    def edge_up(self, outbox: Outbox) -> None:
        self.ups.append(outbox)

    def received(self, outbox: Outbox, entries: Sequence[Entry]) -> None:
        if self.failures:
            raise self.failures.pop()
        self.got += [number_of(message) for message, _ in entries]

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        self.downs.append((outbox.edge.peer, is_polite))


class Side:
    def __init__(self, store: str, config: WorldConfig = RENDEZVOUS) -> None:
        self.manager = MemoryManager(config=config)
        self.manager.failures = []
        self.owner = FakeOwner()
        self.keeper = Edges(self.manager, store, config, self.owner)

    async def close(self) -> None:
        await self.keeper.close()
        await self.manager.close()


def ends(upper: str, lower: str) -> tuple[Edge, Edge]:
    name = f"edge:{upper}>{lower}"
    return Edge(name, lower, 0, is_upstream=False), Edge(
        name, upper, 1, is_upstream=True
    )


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Side, Side]]:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    store = f"memory://edges-{next(_numbers)}"
    one, other = Side(store), Side(store)
    yield one, other
    await asyncio.gather(one.close(), other.close())


async def test_edge_opens_and_carries_messages(sides: tuple[Side, Side]) -> None:
    g, a = sides
    upper, lower = ends("g", "a")
    g.keeper.apply({"a": upper})
    await settle()
    assert g.owner.ups == []
    a.keeper.apply({"g": lower})
    await until(lambda: g.owner.ups and a.owner.ups)
    g.owner.ups[0].put(cancel(1))
    a.owner.ups[0].put(cancel(2))
    await until(lambda: (a.owner.got, g.owner.got) == ([1], [2]))
    g.keeper.apply({"a": upper})  # the same table again changes nothing
    await settle()
    assert (len(g.owner.ups), g.owner.downs) == (1, [])


async def test_edge_that_the_table_drops_is_left_and_its_last_message_sent(
    sides: tuple[Side, Side],
) -> None:
    """The peer sees a polite exit; this side sees a loss."""
    g, a = sides
    upper, lower = ends("g", "a")
    g.keeper.apply({"a": upper})
    a.keeper.apply({"g": lower})
    await until(lambda: g.owner.ups and a.owner.ups)
    for number in (7, 8, 9):
        g.owner.ups[0].put(cancel(number))
    assert not g.owner.ups[0].is_idle
    g.keeper.apply({})
    await until(lambda: g.owner.downs and a.owner.downs)
    assert a.owner.got == [7, 8, 9]
    assert a.owner.downs == [("g", True)]
    assert g.owner.downs == [("a", False)]
    await until(lambda: not g.manager.worlds)


async def test_lost_peer_ends_the_incarnation_and_the_next_is_joined(
    sides: tuple[Side, Side],
) -> None:
    g, a = sides
    upper, lower = ends("g", "a")
    g.keeper.apply({"a": upper})
    a.keeper.apply({"g": lower})
    await until(lambda: g.owner.ups and a.owner.ups)
    await break_world(g.owner.ups[0].world)
    await until(lambda: len(g.owner.ups) == len(a.owner.ups) == 2)
    assert (g.owner.downs, a.owner.downs) == ([("a", False)], [("g", False)])
    g.owner.ups[1].put(cancel(3))
    await until(lambda: a.owner.got == [3])


async def test_owner_with_a_bug_closes_its_edge_which_then_opens_anew(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    """No edge is better than a deaf one; nothing after the bug is used."""
    g, a = sides
    upper, lower = ends("g", "a")
    g.owner.failures.append(IndexError("as asked"))
    g.keeper.apply({"a": upper})
    a.keeper.apply({"g": lower})
    await until(lambda: g.owner.ups and a.owner.ups)
    for number in (1, 2):
        a.owner.ups[0].put(cancel(number))
        a.owner.ups[0].flush()
    await until(lambda: len(g.owner.ups) == len(a.owner.ups) == 2)
    assert "edge edge:g>a: closed after an unexpected error" in caplog.text
    a.owner.ups[1].put(cancel(4))
    await until(lambda: g.owner.got == [4])


async def test_join_that_fails_is_tried_again(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    g, a = sides
    upper, lower = ends("g", "a")
    g.manager.failures += [OSError("no route"), WorldBrokenError("as asked")]
    g.keeper.apply({"a": upper})
    a.keeper.apply({"g": lower})
    await until(lambda: g.owner.ups)
    assert g.manager.kept == 3


async def test_close_leaves_every_edge_and_those_that_nobody_answers(
    sides: tuple[Side, Side],
) -> None:
    g, a = sides
    upper, lower = ends("g", "a")
    g.keeper.apply({"a": upper, "b": ends("g", "b")[0]})
    a.keeper.apply({"g": lower})
    await until(lambda: g.owner.ups and a.owner.ups)
    for number in range(5):
        g.owner.ups[0].put(cancel(number))
    await asyncio.wait_for(g.keeper.close(), HANG_S)
    await until(lambda: a.owner.downs == [("g", True)])
    assert a.owner.got == [0, 1, 2, 3, 4]
    assert not g.manager.worlds


async def test_edge_that_is_wanted_again_at_once_opens_again(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    """A table without the peer may be followed by one with it."""
    caplog.set_level(logging.CRITICAL)
    g, a = sides
    upper, lower = ends("g", "a")
    g.keeper.apply({"a": upper})
    a.keeper.apply({"g": lower})
    await until(lambda: g.owner.ups and a.owner.ups)
    g.keeper.apply({})
    g.keeper.apply({"a": upper})
    await until(lambda: len(g.owner.ups) == 2 and len(a.owner.ups) == 2)
    g.owner.ups[1].put(cancel(8))
    await until(lambda: a.owner.got == [8])
