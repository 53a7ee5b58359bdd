"""A worker between two stages: credit, waiting outputs and returned work."""

from __future__ import annotations

import asyncio

from multiworld.serve.deadlines import SILENT_S
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.inference_messages import Credit, Note, Spent
from multiworld.serve.wire.routing_table import ReplicaState
from tests.unit.serve.edges import HANG_S, Peer, settle, until
from tests.unit.serve.replica.batches.test_worker import (
    answers,
    begun,
    bench,
    handed,
    item,
    key,
    note,
    send,
    table,
)


async def test_output_is_handed_to_the_next_stage_with_all_that_belongs_to_it() -> None:
    async with bench(0, 2, "1-a") as b:
        g, a = await b.connect("g"), await b.connect("1-a")
        share = Share("acme", 2.0, 1)
        sent = item(1, remaining_s=9.0, session="s", via={"1": "1-a"}, share=share)
        await send(g, [sent], 3.0)
        header, contents = await a.receive_with(inference_messages.Work)
        assert header.items == (sent,)
        assert contents[0]["x"].item() == 6.0
        assert b.worker.report().handed == 1
        assert not b.worker.is_idle
        await a.send(inference_messages.CreditReleased((key(1),)))
        await until(lambda: b.worker.is_idle)


async def test_time_that_work_takes_goes_with_it() -> None:
    async with bench(0, 2, "1-a", max_ongoing_requests=1, is_started=False) as b:
        g, a = await b.connect("g"), await b.connect("1-a")
        real = b.model.compute

        def compute(tensors: Tensors) -> Tensors:
            b.clock.advance(4.0)
            return real(tensors)

        b.model.compute = compute
        await send(g, [item(1), item(2, spent=Spent(10.0, 20.0))], 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 2)
        b.clock.advance(3.0)
        b.start()
        work = await a.receive(inference_messages.Work)
        assert work.items[0].spent == Spent(3.0, 4.0)
        await until(lambda: b.worker.report().waiting_for_next == 1)
        b.clock.advance(2.0)
        await a.send(inference_messages.CreditReleased((key(1),)))
        work = await a.receive(inference_messages.Work)
        assert work.items[0].spent == Spent(15.0, 24.0)


async def test_next_stage_without_credit_stops_this_one() -> None:
    async with bench(
        0, 2, "1-a", max_ongoing_requests=1, max_batch_size=1, is_started=False
    ) as b:
        g, a = await b.connect("g"), await b.connect("1-a")
        await send(g, [item(n) for n in range(4)], 0.0, 1.0, 2.0, 3.0)
        await until(lambda: b.worker.report().queued == 4)
        b.start()
        assert await handed(a) == {key(0): 0.0}
        await until(lambda: b.worker.report().waiting_for_next == 1)
        await settle()
        assert b.model.batches == [[0.0], [1.0]]
        for number in (1, 2, 3):
            await a.send(inference_messages.CreditReleased((key(number - 1),)))
            assert await handed(a) == {key(number): 2.0 * number}


async def test_probe_passes_by_outputs_that_wait_for_its_replica() -> None:
    """Otherwise the only replica of the next stage would never become ready."""
    starting = ReplicaState.STARTING
    async with bench(
        0, 2, max_ongoing_requests=1, max_batch_size=1, is_started=False
    ) as b:
        await b.use(table(0, 2, "1-a"))
        g, a = await b.connect("g"), await b.connect("1-a")
        await send(g, [item(n) for n in range(3)], 0.0, 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 3)
        b.start()
        assert await handed(a) == {key(0): 0.0}
        await until(lambda: b.worker.report().waiting_for_next == 1)
        await b.lose("1-a")
        await b.use(table(0, 2, "1-b", **{"1_b": starting}))
        new = await b.connect("1-b")
        await settle()
        await send(g, [item(9, via={"1": "1-b"})], 9.0)
        assert await handed(new) == {key(9): 18.0}
        assert b.model.batches == [[0.0], [1.0], [9.0]]
        await new.send(inference_messages.CreditReleased((key(9),)))
        await b.use(table(0, 2, "1-b"))
        assert await handed(new) == {key(1): 2.0}


async def test_upstream_gets_its_credit_back_when_work_begins_or_is_gone() -> None:
    async with bench(1, 2, "0-z", is_started=False) as b:
        g, z = await b.connect("g"), await b.connect("0-z")
        await send(z, [item(n) for n in (1, 2)], 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 2)
        await g.send(inference_messages.Cancel(key(1)))
        assert await z.receive(Credit) == inference_messages.CreditReleased((key(1),))
        await z.send(inference_messages.Cancel(key(3)))
        await settle()
        await send(z, [item(3)], 3.0)
        assert await z.receive(Credit) == inference_messages.CreditReleased((key(3),))
        b.start()
        assert await begun(g) == ((2, 1),)
        assert await z.receive(Credit) == inference_messages.CreditReleased((key(2),))
        assert await answers(g) == {2: 4.0}


async def test_work_of_a_gateway_that_is_not_connected_goes_back() -> None:
    """Its answer could not reach the gateway from here."""
    async with bench(1, 2, "0-z") as b:
        g, z = await b.connect("g"), await b.connect("0-z")
        await send(z, [item(1, "h"), item(2, "g")], 1.0, 2.0)
        credits: list[Credit] = [await z.receive(Credit) for _ in range(2)]
        assert inference_messages.CreditRefused((key(1, "h"),)) in credits
        assert inference_messages.CreditReleased((key(2),)) in credits
        assert await answers(g) == {2: 4.0}


async def test_waiting_work_of_a_gateway_that_disconnects_goes_back() -> None:
    """Otherwise, nobody would send it again: the sender takes it for begun."""
    async with bench(1, 2, "0-z", is_started=False) as b:
        await b.connect("g")
        z = await b.connect("0-z")
        await send(z, [item(1), item(2)], 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 2)
        await b.lose("g")
        refused = await z.receive(Credit)
        assert refused == inference_messages.CreditRefused((key(1), key(2)))


async def test_work_that_the_next_stage_refused_is_returned_to_its_gateway() -> None:
    async with bench(0, 2, "1-a", "1-b") as b:
        g = await b.connect("g")
        next_ones = {name: await b.connect(name) for name in ("1-a", "1-b")}
        await send(g, [item(1, session="s")], 1.0)
        await begun(g)
        await until(lambda: b.worker.report().handed == 1)
        (at,) = [n for n, peer in next_ones.items() if await peer_has_work(peer)]
        await next_ones[at].send(inference_messages.CreditRefused((key(1),)))
        assert await note(g) == inference_messages.WorkReturned(((1, 1),), 1)
        (other,) = next_ones.keys() - {at}
        await send(g, [item(2, session="s")], 2.0)
        assert await handed(next_ones[other]) == {key(2): 4.0}


async def peer_has_work(peer: Peer) -> bool:
    """Return whether work was handed to a replica, and consume it."""
    waiting = asyncio.ensure_future(handed(peer))
    await settle()
    is_there = waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return is_there


async def test_lost_replica_of_the_next_stage_is_reported_with_its_work() -> None:
    """This includes work that it had just begun, whose note may be lost with it."""
    async with bench(0, 2, "1-a") as b:
        g, a = await b.connect("g"), await b.connect("1-a")
        await send(g, [item(1)], 1.0)
        await handed(a)
        await send(g, [item(2)], 2.0)
        await handed(a)
        await a.send(inference_messages.CreditReleased((key(1),)))
        await until(lambda: b.worker.report().handed == 1)
        for _ in range(2):
            await begun(g)
        await b.lose("1-a")
        assert await note(g) == inference_messages.WorkDropped(((1, 1), (2, 1)), 1)
        assert b.worker.report().counts["dropped"] == 2
        assert b.worker.is_idle


async def test_silent_replica_of_the_next_stage_gets_nothing_and_is_reported() -> None:
    async with bench(0, 2, "1-a") as b:
        g, a = await b.connect("g"), await b.connect("1-a")
        await send(g, [item(1)], 1.0)
        await handed(a)
        await begun(g)
        b.outboxes["1-a"].quiet_s = 2 * SILENT_S
        assert await note(g) == inference_messages.WorkStuck(((1, 1),), 1)
        await send(g, [item(2)], 2.0)
        assert await begun(g) == ((2, 1),)
        await until(lambda: b.worker.report().waiting_for_next == 1)
        assert not await g.has_sent(Note)
        b.outboxes["1-a"].quiet_s = 0.0
        assert await handed(a) == {key(2): 4.0}


async def test_cancellation_follows_the_work_to_the_next_stage() -> None:
    async with bench(0, 2, "1-a", max_ongoing_requests=1) as b:
        g, a = await b.connect("g"), await b.connect("1-a")
        await send(g, [item(1), item(2)], 1.0, 2.0)
        assert list(await handed(a)) == [key(1)]
        await until(lambda: b.worker.report().waiting_for_next == 1)
        for number in (1, 2):
            await g.send(inference_messages.Cancel(key(number)))
        assert await a.receive(inference_messages.Cancel) == inference_messages.Cancel(
            key(1)
        )
        await until(lambda: b.worker.report().waiting_for_next == 0)


async def test_outputs_go_back_when_the_next_stage_is_gone_from_the_table() -> None:
    """The version is being replaced, so nobody will take them."""
    async with bench(0, 2, "1-a", max_ongoing_requests=1) as b:
        g, a = await b.connect("g"), await b.connect("1-a")
        await send(g, [item(1), item(2)], 1.0, 2.0)
        await handed(a)
        await begun(g)
        await until(lambda: b.worker.report().waiting_for_next == 1)
        await b.use(table(0, 2))
        assert await note(g) == inference_messages.WorkReturned(((2, 1),), 1)


async def test_lost_replica_of_the_stage_before_is_no_loss_here() -> None:
    async with bench(1, 2, "0-z", is_started=False) as b:
        g, z = await b.connect("g"), await b.connect("0-z")
        await send(z, [item(1)], 1.0)
        await until(lambda: b.worker.report().queued == 1)
        await b.lose("0-z")
        b.start()
        assert await answers(g) == {1: 2.0}
        assert b.worker.report().upstream == ()


async def test_all_that_was_sent_can_be_waited_for() -> None:
    """A worker waits like this before it exits."""
    async with bench(1, 3, "0-z", "2-a") as b:
        for name in ("g", "0-z", "2-a"):
            await b.connect(name)
        await asyncio.wait_for(b.worker.wait_sent(), HANG_S)
        held = asyncio.Event()
        b.outboxes["2-a"].hold(held.wait())
        waiting = asyncio.ensure_future(b.worker.wait_sent())
        await settle()
        assert not waiting.done()
        held.set()
        await asyncio.wait_for(waiting, HANG_S)
