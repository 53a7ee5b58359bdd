"""The dispatcher: requests over real edges to fake replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from multiworld.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelFailedError,
    NoReplicaError,
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
    UnknownModelError,
)
from multiworld.serve.gateway.admission.timing import Timing
from multiworld.serve.gateway.requests import dispatcher as module
from multiworld.serve.gateway.requests.dispatcher import Dispatcher
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.edges import listen
from multiworld.serve.wire.inference_messages import (
    AnswerItem,
    Attempt,
    Note,
    Spent,
    WorkItem,
)
from multiworld.serve.wire.protocol import FRAMES, RemoteError
from multiworld.serve.wire.routing_table import (
    Edge,
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from multiworld.testing import Arena
from tests.unit.serve.edges import (
    HANG_S,
    Peer,
    QuietOutbox,
    break_world,
    connect,
    settle,
    until,
)

READY, STARTING = ReplicaState.READY, ReplicaState.STARTING


def x(*values: float) -> Tensors:
    return {"x": torch.tensor(values)}


def table(
    *stages: Sequence[str],
    model: str = "m",
    starting: Sequence[str] = (),
    queue: int = 100,
    ongoing: int = 100,
    on_demand: tuple[int, ...] = (),
) -> RoutingTable:
    replicas = {
        name: Replica(name, model, "1", stage, STARTING if name in starting else READY)
        for stage, names in enumerate(stages)
        for name in names
    }
    route = Route("1", {"1": len(stages)}, queue, ongoing, 30.0, 10.0, on_demand)
    return RoutingTable(1, ("g",), {model: route}, replicas)


class FakeReplica:
    def __init__(self, outbox: QuietOutbox, peer: Peer, tasks: list[Any]) -> None:
        self.outbox, self.peer, self.tasks = outbox, peer, tasks

    async def work(self) -> tuple[list[WorkItem], list[Tensors]]:
        header, contents = await self.peer.receive_with(inference_messages.Work)
        return list(header.items), list(contents)

    async def one(self) -> Attempt:
        """Receive work that has one item; return its attempt."""
        (item,), _ = await self.work()
        return item.key[1], item.key[2]

    async def begin(self, *attempts: Attempt, is_isolated: bool = False) -> None:
        await self.note(inference_messages.BatchBegun(attempts, is_isolated))

    async def note(self, note: Note) -> None:
        """Send a note, and wait until the dispatcher has read it."""
        await self.peer.send(note)
        await settle()

    async def answer(
        self, attempt: Attempt, *values: float, is_last: bool = True
    ) -> None:
        header = inference_messages.Answers((AnswerItem(attempt, is_last),))
        await self.peer.send_with(header, [x(*values)])


class Gate:
    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.dispatcher = Dispatcher("g")
        self.replicas: dict[str, FakeReplica] = {}
        self._looking: asyncio.Task[None] | None = None
        self.calls: list[asyncio.Task[Tensors]] = []

    async def use(self, given: RoutingTable) -> None:
        """Apply a table, and connect all its replicas."""
        self.dispatcher.table_changed(given)
        for name in given.replicas:
            await self.connect(name)

    async def connect(self, name: str) -> FakeReplica:
        edge = Edge(f"edge:g>{name}", name, 0, is_upstream=False)
        outbox, peer = await connect(self._arena, edge)
        self.dispatcher.edge_up(outbox)
        listen(outbox, self.dispatcher)
        tasks = [asyncio.ensure_future(outbox.run())]
        self.replicas[name] = FakeReplica(outbox, peer, tasks)
        return self.replicas[name]

    async def lose(self, name: str, *, is_polite: bool = False) -> None:
        replica = self.replicas.pop(name)
        if is_polite:
            await replica.peer.world.close()
        else:
            await break_world(replica.outbox.world)
        for task in replica.tasks:
            task.cancel()
        await asyncio.gather(*replica.tasks, return_exceptions=True)
        self.dispatcher.edge_down(replica.outbox, is_polite=is_polite)

    def look(self) -> None:
        """Check deadlines and silence in the background."""
        self._looking = asyncio.ensure_future(self.dispatcher.look())

    def ask(self, *values: float, **more: Any) -> asyncio.Task[Tensors]:
        call = asyncio.ensure_future(self.dispatcher.infer("m", x(*values), **more))
        self.calls.append(call)
        return call

    async def close(self) -> None:
        tasks: list[asyncio.Task[Any]] = [*self.calls]
        if self._looking is not None:
            tasks.append(self._looking)
        for replica in self.replicas.values():
            tasks += replica.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def gate(
    given: RoutingTable, monkeypatch: pytest.MonkeyPatch | None = None
) -> AsyncIterator[Gate]:
    if monkeypatch is not None:
        monkeypatch.setattr(module, "POLL_S", 0.001)
    async with Arena("memory") as arena:
        made = Gate(arena)
        try:
            await made.use(given)
            yield made
        finally:
            await made.close()


async def soon(work: Awaitable[Tensors]) -> list[float]:
    async with asyncio.timeout(HANG_S):
        return [float(value) for value in (await work)["x"]]


# Answers.


async def test_request_travels_with_its_header_and_its_answer_is_returned() -> None:
    async with gate(table(["a"])) as g:
        share = Share("acme", 2.0, 1)
        call = g.ask(1.0, 2.0, deadline_s=5.0, session="s", share=share)
        (item,), (tensors,) = await g.replicas["a"].work()
        assert item.key == ("g", 1, 1)
        assert 4.0 < item.remaining_s <= 5.0
        assert (item.session, item.share, item.is_isolated) == ("s", share, False)
        assert tensors["x"].tolist() == [1.0, 2.0]
        assert g.dispatcher.in_flight == 1
        await g.replicas["a"].answer((1, 1), 7.0, 8.0)
        assert await soon(call) == [7.0, 8.0]
        report = g.dispatcher.report()
        assert (report.in_flight, report.load, report.connected) == (
            0,
            {"a": 0},
            ("a",),
        )
        assert (report.counts, report.arrived) == ({"answered": 1}, {"m": 1})
        assert (report.attained, report.missed) == ({"m": 1}, {})


async def test_waiting_requests_leave_in_one_bundle_when_a_replica_connects() -> None:
    async with Arena("memory") as arena:
        g = Gate(arena)
        g.dispatcher.table_changed(table(["a"]))
        calls = [g.ask(float(n)) for n in range(3)]
        await settle()
        assert g.dispatcher.waiting("m") == 3
        assert g.dispatcher.missing("m") == [0]
        replica = await g.connect("a")
        items, contents = await replica.work()
        assert [item.key[1] for item in items] == [1, 2, 3]
        assert [c["x"].item() for c in contents] == [0.0, 1.0, 2.0]
        header = inference_messages.Answers(
            tuple(AnswerItem((n, 1)) for n in (3, 1, 2))
        )
        await replica.peer.send_with(header, [x(30.0), x(10.0), x(20.0)])
        assert [await soon(call) for call in calls] == [[10.0], [20.0], [30.0]]
        await g.close()


async def test_times_of_a_request_are_those_of_gateway_and_replicas() -> None:
    """Waiting at the gateway ends when the request is first sent."""
    async with gate(table(["a"], ongoing=1)) as g:
        first, timing = g.ask(1.0), Timing()
        second = g.ask(2.0, timing=timing)
        attempt = await g.replicas["a"].one()
        await asyncio.sleep(0.02)
        await g.replicas["a"].answer(attempt, 1.0)
        await soon(first)
        attempt = await g.replicas["a"].one()
        answer = inference_messages.Answers(
            (AnswerItem(attempt, spent=Spent(5.0, 7.0)),)
        )
        await g.replicas["a"].peer.send_with(answer, [x(2.0)])
        await soon(second)
        assert timing.asked_at is not None
        assert timing.answered_at >= timing.asked_at + 0.02
        assert 5.02 <= timing.queued_s < 5.0 + timing.answered_at - timing.asked_at
        assert (timing.computed_s, timing.parts) == (7.0, 1)


async def test_last_part_of_an_answer_is_returned() -> None:
    async with gate(table(["a"])) as g:
        call = g.ask(1.0)
        attempt = await g.replicas["a"].one()
        await g.replicas["a"].answer(attempt, 1.0, is_last=False)
        await g.replicas["a"].answer(attempt, 2.0)
        assert await soon(call) == [2.0]


async def test_answers_that_nobody_waits_for_are_dropped() -> None:
    async with gate(table(["a"])) as g:
        await g.replicas["a"].answer((99, 1), 1.0)
        call = g.ask(1.0)
        attempt = await g.replicas["a"].one()
        await g.replicas["a"].answer(attempt, 2.0)
        await g.replicas["a"].answer(attempt, 3.0)
        assert await soon(call) == [2.0]
        await settle()
        assert g.dispatcher.report().counts == {"answered": 1}


# Refusals.


async def test_unknown_model_and_disagreeing_rows_are_refused_uncounted() -> None:
    async with gate(table(["a"])) as g:
        with pytest.raises(UnknownModelError, match=r"unknown model 'none'.*: m$"):
            await g.dispatcher.infer("none", x(1.0))
        bad = {"x": torch.ones(2), "y": torch.ones(3)}
        with pytest.raises(InvalidRequestError, match="same number of rows"):
            await g.dispatcher.infer("m", bad)
        assert g.dispatcher.report().arrived == {}
        assert g.dispatcher.in_flight == 0


async def test_full_queue_refuses_and_counts_it() -> None:
    async with gate(table(["a"], queue=1, ongoing=1)) as g:
        first, second = g.ask(1.0), g.ask(2.0)
        await g.replicas["a"].one()
        with pytest.raises(OverloadedError, match="queue of model 'm' is full"):
            await g.ask(3.0)
        report = g.dispatcher.report()
        assert (report.refused, report.missed) == ({"m": 1}, {"m": 1})
        assert report.counts == {"OverloadedError": 1}
        await g.replicas["a"].answer((1, 1), 1.0)
        assert await soon(first) == [1.0]
        await g.replicas["a"].answer(await g.replicas["a"].one(), 2.0)
        assert await soon(second) == [2.0]


async def test_quarantine_rejects_what_waits_for_either_route_of_the_model() -> None:
    """The tenant's dedicated replicas serve the same model."""
    async with gate(RoutingTable()) as g:
        routes = {name: Route("1", {"1": 1}) for name in ("m", "m@acme")}
        g.dispatcher.table_changed(RoutingTable(1, ("g",), routes))
        calls = [
            asyncio.ensure_future(
                g.dispatcher.infer(model, x(1.0), share=Share(tenant))
            )
            for model, tenant in (("m", "acme"), ("m@acme", "acme"), ("m", "beta"))
        ]
        g.calls += calls
        await settle()
        g.dispatcher.quarantine("acme", "m")
        for call in calls[:2]:
            with pytest.raises(QuarantinedError):
                await call
        assert not calls[2].done()


async def test_model_that_is_no_longer_served_rejects_what_waits() -> None:
    """The caller does not wait for its deadline."""
    async with gate(table([])) as g:
        call = g.ask(1.0)
        await settle()
        g.dispatcher.table_changed(RoutingTable(2, ("g",)))
        with pytest.raises(UnknownModelError, match="no longer served"):
            await call


async def test_failure_of_the_model_is_raised_with_its_type() -> None:
    async with gate(table(["a"])) as g:
        bad, good = g.ask(1.0), g.ask(2.0)
        one, other = await g.replicas["a"].one(), await g.replicas["a"].one()
        error = RemoteError.of(ModelFailedError("it broke", stage="head"))
        await g.replicas["a"].note(inference_messages.WorkFailed(one, error))
        with pytest.raises(ModelFailedError, match="it broke") as found:
            await bad
        assert found.value.stage == "head"
        await g.replicas["a"].answer(other, 4.0)
        assert await soon(good) == [4.0]


# Callers that give up.


async def test_cancelled_caller_frees_the_replica() -> None:
    async with gate(table(["a"])) as g:
        call = g.ask(1.0)
        attempt = await g.replicas["a"].one()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        cancel = await g.replicas["a"].peer.receive(inference_messages.Cancel)
        assert cancel == inference_messages.Cancel(("g", *attempt))
        assert g.dispatcher.in_flight == 0
        await g.replicas["a"].answer(attempt, 1.0)
        await settle()
        report = g.dispatcher.report()
        assert (report.counts, report.load) == ({}, {"a": 0})


async def test_cancelled_caller_that_waited_leaves_the_queue() -> None:
    async with gate(table(["a"], ongoing=1)) as g:
        first, second, third = g.ask(1.0), g.ask(2.0), g.ask(3.0)
        attempt = await g.replicas["a"].one()
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert g.dispatcher.waiting("m") == 1
        await g.replicas["a"].answer(attempt, 1.0)
        assert await soon(first) == [1.0]
        (item,), (tensors,) = await g.replicas["a"].work()
        assert (item.key[1], tensors["x"].item()) == (3, 3.0)
        third.cancel()


async def test_deadline_is_raised_and_cancels_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gate(table(["a"]), monkeypatch) as g:
        g.look()
        call = g.ask(1.0, deadline_s=0.02)
        attempt = await g.replicas["a"].one()
        with pytest.raises(DeadlineExceededError, match="it was at a"):
            await soon(call)
        assert await g.replicas["a"].peer.receive(
            inference_messages.Cancel
        ) == inference_messages.Cancel(("g", *attempt))
        assert g.dispatcher.report().counts == {"DeadlineExceededError": 1}


async def test_stage_without_a_replica_until_the_deadline_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client may retry: the request is not at fault."""
    async with gate(table(["a"], []), monkeypatch) as g:
        g.look()
        with pytest.raises(NoReplicaError, match="no replica of stage 1"):
            await soon(g.ask(1.0, deadline_s=0.02))


# Replicas that end.


async def test_request_of_a_lost_replica_is_sent_to_another() -> None:
    async with gate(table(["a", "b"])) as g:
        call = g.ask(5.0)
        await settle()
        (at,) = [n for n, count in g.dispatcher.report().load.items() if count]
        (other,) = {"a", "b"} - {at}
        await g.lose(at)
        (item,), (tensors,) = await g.replicas[other].work()
        assert (item.key, item.is_isolated) == (("g", 1, 2), False)
        assert tensors["x"].item() == 5.0
        await g.replicas[other].answer((1, 2), 6.0)
        assert await soon(call) == [6.0]
        assert g.dispatcher.report().counts == {"replayed": 1, "answered": 1}


async def test_request_that_kills_its_replicas_is_refused() -> None:
    """It is isolated after the first loss, and refused after two more."""
    async with gate(table(["a"])) as g:
        call = g.ask(1.0)
        for nth in (1, 2, 3):
            (item,), _ = await g.replicas["a"].work()
            assert item.is_isolated == (nth > 1)
            await g.replicas["a"].begin((1, nth), is_isolated=nth > 1)
            await g.lose("a")
            await g.connect("a")
        with pytest.raises(RequestPoisonedError, match="2 replicas died"):
            await soon(call)
        assert g.dispatcher.report().counts == {
            "replayed": 2,
            "RequestPoisonedError": 1,
        }


async def test_clean_exit_of_a_replica_makes_no_request_a_suspect() -> None:
    """It did not die of what it computed."""
    async with gate(table(["a"])) as g:
        call = g.ask(1.0)
        for nth in (1, 2, 3, 4):
            (item,), _ = await g.replicas["a"].work()
            assert (item.key[2], item.is_isolated) == (nth, False)
            await g.replicas["a"].begin((1, nth))
            await g.lose("a", is_polite=True)
            await g.connect("a")
        await g.replicas["a"].one()
        await g.replicas["a"].answer((1, 5), 1.0)
        assert await soon(call) == [1.0]


async def test_end_of_an_older_edge_does_not_end_the_newer_one() -> None:
    async with gate(table(["a"])) as g:
        call = g.ask(1.0)
        older = g.replicas["a"]
        newer = older.outbox.__class__(older.outbox.edge, older.outbox.world)
        g.dispatcher.edge_up(newer)
        g.dispatcher.edge_down(older.outbox, is_polite=False)
        assert g.dispatcher.report().connected == ("a",)
        await older.answer(await older.one(), 3.0)
        assert await soon(call) == [3.0]
        g.dispatcher.edge_down(newer, is_polite=False)
        assert g.dispatcher.report().connected == ()


async def test_silent_replica_is_hedged_and_the_first_answer_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gate(table(["a", "b"]), monkeypatch) as g:
        g.look()
        call = g.ask(1.0)
        await settle()
        (at,) = [n for n, count in g.dispatcher.report().load.items() if count]
        (other,) = {"a", "b"} - {at}
        g.replicas[at].outbox.quiet_s = 1.0
        assert await g.replicas[other].one() == (1, 2)
        assert g.dispatcher.report().silent == (at,)
        await g.replicas[other].answer((1, 2), 2.0)
        assert await soon(call) == [2.0]
        assert await g.replicas[at].peer.receive(
            inference_messages.Cancel
        ) == inference_messages.Cancel(("g", 1, 1))
        g.replicas[at].outbox.quiet_s = 0.0
        await until(lambda: g.dispatcher.report().silent == ())


async def test_silence_that_ended_with_the_edge_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gate(table(["a"]), monkeypatch) as g:
        g.look()
        g.replicas["a"].outbox.quiet_s = 1.0
        await until(lambda: g.dispatcher.report().silent == ("a",))
        call = g.ask(1.0)
        await g.lose("a")
        assert g.dispatcher.report().silent == ()
        replica = await g.connect("a")
        await replica.answer(await replica.one(), 2.0)
        assert await soon(call) == [2.0]


async def test_notes_about_the_next_stage_replay_what_did_not_reach_it() -> None:
    """Returned or dropped work is sent again; stuck work is hedged."""
    async with gate(table(["a"], ["b"])) as g:
        call = g.ask(1.0)
        attempt = await g.replicas["a"].one()
        await g.replicas["a"].begin(attempt)
        await g.replicas["a"].note(inference_messages.WorkReturned((attempt,), 1))
        attempt = await g.replicas["a"].one()
        assert attempt == (1, 2)
        await g.replicas["a"].begin(attempt)
        await g.replicas["a"].note(inference_messages.WorkDropped((attempt,), 1))
        attempt = await g.replicas["a"].one()
        assert attempt == (1, 3)
        await g.replicas["a"].note(inference_messages.WorkStuck((attempt,), 1))
        assert await g.replicas["a"].one() == (1, 4)
        await g.replicas["b"].begin((1, 3))
        await g.replicas["b"].answer((1, 3), 9.0)
        assert await soon(call) == [9.0]
        assert g.dispatcher.report().counts == {"replayed": 3, "answered": 1}


# Models that scale to zero, and probes.


async def test_model_at_zero_is_requested_repeatedly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gate(table([], on_demand=(0,)), monkeypatch) as g:
        asked: list[str] = []
        g.dispatcher.on_missing = asked.append
        g.look()
        await settle()
        assert asked == []
        call = g.ask(1.0)
        await until(lambda: len(asked) > 3)
        assert set(asked) == {"m"}
        await g.use(table(["a"], on_demand=(0,)))
        await g.replicas["a"].one()
        asked.clear()
        other = g.ask(2.0)
        await g.replicas["a"].one()
        assert asked == []
        for one in (call, other):
            one.cancel()


async def test_probe_goes_through_a_starting_replica_and_is_not_counted() -> None:
    async with gate(table(["a"], starting=["a"])) as g:
        call = g.ask(1.0)
        probe = asyncio.ensure_future(g.dispatcher.probe("a", x(0.0), 5.0))
        (item,), _ = await g.replicas["a"].work()
        assert (item.key, item.via) == (("g", 2, 1), {"0": "a"})
        await g.replicas["a"].answer((2, 1), 0.0)
        await asyncio.wait_for(probe, HANG_S)
        assert g.dispatcher.report().arrived == {"m": 1}
        assert g.dispatcher.report().attained == {}
        assert not call.done()


async def test_probe_of_an_unknown_replica_is_refused() -> None:
    """The table may have changed since the probe was ordered."""
    async with gate(table(["a"])) as g:
        with pytest.raises(UnknownModelError, match="no replica 'z'"):
            await g.dispatcher.probe("z", x(0.0), 5.0)


async def test_probe_of_a_replica_that_hangs_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller gets an error instead of silence."""
    async with gate(table(["a"]), monkeypatch) as g:
        g.look()
        with pytest.raises(DeadlineExceededError):
            await g.dispatcher.probe("a", x(0.0), 0.02)


# Messages that make no sense.


async def test_message_that_is_not_understood_closes_its_edge_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gate(table(["a", "b"])) as g:
        bad, good = g.replicas["a"], g.replicas["b"]
        await bad.peer.world.send(torch.ones(9), dst=0, tag=FRAMES)
        await until(lambda: bad.outbox.world.is_closed)
        assert "closed after an unexpected error" in caplog.text
        assert not good.outbox.world.is_closed


async def test_answer_with_tensors_of_no_item_closes_its_edge(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gate(table(["a"])) as g:
        call = g.ask(1.0)
        replica = g.replicas["a"]
        answer = inference_messages.Answers((AnswerItem(await replica.one()),))
        await replica.peer.send_with(answer, [x(1.0), x(2.0)])
        await until(lambda: replica.outbox.world.is_closed)
        assert "2 contents for 1 items" in caplog.text
        assert not call.done()
