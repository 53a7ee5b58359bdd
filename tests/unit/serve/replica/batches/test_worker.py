"""The worker, on real edges to gateways and replicas that the tests play."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from multiworld.errors import InvalidRequestError
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.replica.batches import executor as executor_module
from multiworld.serve.replica.batches import worker as module
from multiworld.serve.replica.batches.executor import Executor, Quickness
from multiworld.serve.replica.batches.worker import Worker, WorkerLimits
from multiworld.serve.replica.hang_guard import EXIT_HUNG
from multiworld.serve.spec.stage import Stage, StageContext, Tensors
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.edges import listen
from multiworld.serve.wire.inference_messages import Attempt, Note, WorkItem
from multiworld.serve.wire.protocol import FRAMES, Key
from multiworld.serve.wire.routing_table import (
    Edge,
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
    edges_of,
)
from multiworld.testing import Arena, FakeClock
from tests.recorded import recorded
from tests.unit.serve.edges import (
    HANG_S,
    Peer,
    QuietOutbox,
    break_world,
    close_executor,
    connect,
    settle,
    until,
)

ME = "me"


def table(stage: int, stages: int, *names: str, **states: ReplicaState) -> RoutingTable:
    """Return a table with this worker at ``stage`` and replicas named ``STAGE-…``."""
    ready = ReplicaState.READY
    replicas = {ME: Replica(ME, "m", "1", stage, ready)}
    for name in names:
        state = states.get(name.replace("-", "_"), ready)
        replicas[name] = Replica(name, "m", "1", int(name[0]), state)
    routes = {"m": Route("1", {"1": stages})}
    return RoutingTable(1, ("g", "h"), routes, replicas)


class FakeModel:
    """The model of a stage; it computes while `gate` is set."""

    def __init__(self) -> None:
        self.compute: Callable[[Tensors], Tensors] = self.double
        self.thread: threading.Thread | None = None
        self.batches: list[list[float]] = []
        self.gate, self.is_computing = threading.Event(), threading.Event()
        self.gate.set()

    def load(self, context: StageContext) -> Any:
        self.thread = threading.current_thread()
        return lambda tensors: self.compute(tensors)

    def double(self, tensors: Tensors) -> Tensors:
        self.is_computing.set()
        assert self.gate.wait(HANG_S)
        self.is_computing.clear()
        values = tensors["x"].tolist()
        self.batches.append(values)
        if 13.0 in values:
            raise InvalidRequestError("13 is refused")
        if 66.0 in values:
            raise KeyError("as asked")
        return {"x": tensors["x"] * 2}


class Bench:
    def __init__(
        self, arena: Arena, stage: int, stages: int, limits: WorkerLimits
    ) -> None:
        self._arena = arena
        self.model, self.clock = FakeModel(), FakeClock()
        is_last = stage == stages - 1
        with recorded(executor_module, Quickness) as measures:
            self.executor = Executor(Stage(load=self.model.load), "s", 1)
        (self.quickness,) = measures
        with recorded(module, PauseDetector) as detectors:
            self.worker = Worker(
                ME, stage, is_last, self.executor, limits, lambda: self.clock.now
            )
        (self.pauses,) = detectors
        self.outboxes: dict[str, QuietOutbox] = {}
        self.tasks: dict[str, list[asyncio.Task[None]]] = {}
        self.own: list[asyncio.Task[None]] = []

    async def use(self, given: RoutingTable) -> None:
        self.worker.table_changed(given)
        self.edges: dict[str, Edge] = edges_of(given, ME)

    async def connect(self, name: str) -> Peer:
        outbox, peer = await connect(self._arena, self.edges[name])
        self.worker.edge_up(outbox)
        listen(outbox, self.worker)
        self.tasks[name] = [asyncio.ensure_future(outbox.run())]
        self.outboxes[name] = outbox
        return peer

    async def lose(self, name: str) -> None:
        outbox, tasks = self.outboxes.pop(name), self.tasks.pop(name)
        await break_world(outbox.world)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.worker.edge_down(outbox, is_polite=False)

    def start(self) -> None:
        for body in (self.worker.run, self.worker.look):
            self.own.append(asyncio.ensure_future(body()))

    async def close(self) -> None:
        self.model.gate.set()
        tasks = [*self.own, *(t for many in self.tasks.values() for t in many)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_executor(self.executor, self.model.thread)


@asynccontextmanager
async def bench(
    stage: int = 0,
    stages: int = 1,
    *peers: str,
    is_started: bool = True,
    **limits: Any,
) -> AsyncIterator[Bench]:
    """Return a worker that computes; ``peers`` are replicas of other stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOOK_S", 0.002)
        async with Arena("memory") as arena:
            made = Bench(arena, stage, stages, WorkerLimits(**limits))
            try:
                await made.executor.load(StageContext())
                await made.use(table(stage, stages, *peers))
                if is_started:
                    made.start()
                yield made
            finally:
                await made.close()


def item(number: int, gateway: str = "g", **more: Any) -> WorkItem:
    return WorkItem((gateway, number, 1), **{"remaining_s": 50.0, **more})


async def send(peer: Peer, items: Sequence[WorkItem], *values: float) -> None:
    contents = [{"x": torch.tensor([value])} for value in values]
    await peer.send_with(inference_messages.Work(tuple(items)), contents)


async def note(peer: Peer) -> Note:
    found: Note = await peer.receive(Note)
    return found


async def begun(peer: Peer) -> tuple[Attempt, ...]:
    found = await note(peer)
    assert isinstance(found, inference_messages.BatchBegun), found
    return found.attempts


async def answers(peer: Peer) -> dict[int, float]:
    header, contents = await peer.receive_with(inference_messages.Answers)
    return {
        one.attempt[0]: tensors["x"].item()
        for one, tensors in zip(header.items, contents, strict=True)
    }


async def handed(peer: Peer) -> dict[Key, float]:
    header, contents = await peer.receive_with(inference_messages.Work)
    return {
        one.key: tensors["x"].item()
        for one, tensors in zip(header.items, contents, strict=True)
    }


def key(number: int, gateway: str = "g") -> Key:
    return (gateway, number, 1)


# A stage that is the first and the last.


async def test_batch_is_announced_computed_together_and_answered() -> None:
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        await send(g, [item(1), item(2)], 3.0, 4.0)
        await until(lambda: b.worker.report().queued == 2)
        assert not b.worker.is_idle
        b.start()
        assert await begun(g) == ((1, 1), (2, 1))
        assert await answers(g) == {1: 6.0, 2: 8.0}
        assert b.model.batches == [[3.0, 4.0]]
        await until(lambda: b.worker.is_idle)
        report = b.worker.report()
        assert report.counts == {"batches": 1, "rows": 2, "requests": 2}
        assert (report.gateways, report.upstream, report.downstream) == (("g",), (), ())
        assert b.worker.has_gateway


async def test_batch_of_two_gateways_is_announced_and_answered_to_each() -> None:
    async with bench(is_started=False) as b:
        g, h = await b.connect("g"), await b.connect("h")
        await send(g, [item(1)], 1.0)
        await send(h, [item(1, "h")], 2.0)
        await until(lambda: b.worker.report().queued == 2)
        b.start()
        assert (await begun(g), await begun(h)) == (((1, 1),), ((1, 1),))
        assert (await answers(g), await answers(h)) == ({1: 2.0}, {1: 4.0})


async def test_request_that_fails_fails_alone() -> None:
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        await send(g, [item(n) for n in (1, 2, 3)], 1.0, 13.0, 66.0)
        await until(lambda: b.worker.report().queued == 3)
        b.start()
        assert len(await begun(g)) == 3
        failed = [await note(g), await note(g)]
        errors = {
            n.attempt[0]: n.error
            for n in failed
            if isinstance(n, inference_messages.WorkFailed)
        }
        assert (errors[2].kind, errors[2].text) == (
            "InvalidRequestError",
            "13 is refused",
        )
        assert (errors[3].kind, errors[3].stage) == ("ModelFailedError", "s")
        assert await answers(g) == {1: 2.0}
        assert b.worker.counts["failed"] == 2


async def test_tenant_whose_requests_fail_is_charged_for_all_computations() -> None:
    async with bench(is_started=False, max_batch_size=4) as b:
        g = await b.connect("g")
        bad, good = Share("bad"), Share("good")
        await send(g, [item(n, share=bad) for n in range(4)], *[66.0] * 4)
        await until(lambda: b.worker.report().queued == 4)
        b.start()
        await until(lambda: len(b.model.batches) == 7)
        items = [item(9, share=bad), *(item(n, share=good) for n in range(10, 22))]
        await send(g, items, 2.0, *[1.0] * 12)
        await until(lambda: len(b.model.batches) == 11)
        assert b.model.batches[7:] == [*[[1.0] * 4] * 3, [2.0]]


async def test_request_with_more_rows_than_a_batch_is_refused() -> None:
    """It would wait forever."""
    async with bench(max_batch_size=2) as b:
        g = await b.connect("g")
        header = inference_messages.Work((item(1), item(2)))
        contents = [{"x": torch.ones(3)}, {"x": torch.ones(1)}]
        await g.send_with(header, contents)
        failed = await note(g)
        assert isinstance(failed, inference_messages.WorkFailed)
        assert "3 rows does not fit into a batch of at most 2" in failed.error.text
        assert await begun(g) == ((2, 1),)
        assert await answers(g) == {2: 2.0}


async def test_suspect_is_computed_alone() -> None:
    """The gateway counts losses by such announcements."""
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        work = [item(1), item(2, is_isolated=True), item(3)]
        await send(g, work, 1.0, 2.0, 3.0)
        await until(lambda: b.worker.report().queued == 3)
        b.start()
        notes = [await note(g) for _ in range(2)]
        assert inference_messages.BatchBegun(((2, 1),), is_isolated=True) in notes
        assert (
            inference_messages.BatchBegun(((1, 1), (3, 1)), is_isolated=False) in notes
        )


async def test_late_work_is_not_computed() -> None:
    """Its gateway has already answered."""
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        await send(g, [item(1, remaining_s=1.0), item(2, remaining_s=9.0)], 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 2)
        b.clock.advance(2.0)
        b.start()
        assert await begun(g) == ((2, 1),)
        assert await answers(g) == {2: 4.0}


async def test_work_waits_for_company_for_a_while() -> None:
    async with bench(max_wait_s=1000.0, max_batch_size=2) as b:
        g = await b.connect("g")
        await send(g, [item(1)], 1.0)
        await settle()
        assert b.worker.report().queued == 1
        await send(g, [item(2)], 2.0)
        assert await begun(g) == ((1, 1), (2, 1))


# Cancelling.


async def test_cancelled_work_is_taken_from_the_queue() -> None:
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        await send(g, [item(1), item(2)], 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 2)
        await g.send(inference_messages.Cancel(key(1)))
        await until(lambda: b.worker.report().queued == 1)
        await g.send(inference_messages.Cancel(key(3)))
        await settle()
        await send(g, [item(3)], 3.0)
        await settle()
        b.start()
        assert await begun(g) == ((2, 1),)
        assert await answers(g) == {2: 4.0}
        assert b.worker.report().queued == 0
        assert b.worker.counts["cancelled"] == 1


async def test_answer_to_what_was_cancelled_meanwhile_is_not_sent() -> None:
    """The computation itself cannot be stopped."""
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        b.model.gate.clear()
        await send(g, [item(1), item(2)], 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 2)
        b.start()
        await begun(g)
        await until(b.model.is_computing.is_set)
        assert b.worker.report().computing == 2
        await g.send(inference_messages.Cancel(key(1)))
        await settle()
        b.model.gate.set()
        assert await answers(g) == {2: 4.0}


async def test_gateway_is_notified_when_abandoned_work_is_computed() -> None:
    """Until then the replica is busy, though nobody waits for its result."""
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        b.model.gate.clear()
        await send(g, [item(1)], 1.0)
        await until(lambda: b.worker.report().queued == 1)
        b.start()
        assert await begun(g) == ((1, 1),)
        await g.send(inference_messages.Cancel(key(1)))
        await settle()
        b.model.gate.set()
        assert await begun(g) == ()
        # A cancellation may come after the batch has ended.
        await send(g, [item(2)], 2.0)
        assert await begun(g) == ((2, 1),)
        assert await answers(g) == {2: 4.0}
        await g.send(inference_messages.Cancel(key(2)))
        assert await begun(g) == ()


async def test_cancelled_keys_are_remembered_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway that keeps cancelling must not fill the memory."""
    monkeypatch.setattr(module, "MAX_CANCELLED", 3)
    async with bench() as b:
        g = await b.connect("g")
        for number in range(10):
            await g.send(inference_messages.Cancel(key(number)))
        await settle()
        await send(g, [item(0), item(9)], 1.0, 2.0)
        assert await answers(g) == {0: 2.0}


# Gateways that exit.


async def test_work_of_a_lost_gateway_is_dropped() -> None:
    async with bench(is_started=False, max_batch_size=1) as b:
        g, h = await b.connect("g"), await b.connect("h")
        b.model.gate.clear()
        await send(g, [item(1), item(2)], 1.0, 2.0)
        await until(lambda: b.worker.report().queued == 2)
        await send(h, [item(1, "h")], 5.0)
        await until(lambda: b.worker.report().queued == 3)
        b.start()
        await until(b.model.is_computing.is_set)
        await b.lose("g")
        b.model.gate.set()
        assert await answers(h) == {1: 10.0}
        await until(lambda: b.worker.is_idle)
        assert b.model.batches == [[1.0], [5.0]]
        assert b.worker.report().gateways == ("h",)


async def test_gateway_that_does_not_read_blocks_no_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TELL_S", 0.02)
    async with bench() as b:
        g = await b.connect("g")
        b.tasks["g"][0].cancel()  # its socket is full: nothing leaves the outbox
        b.outboxes["g"].hold(asyncio.get_running_loop().create_future())
        await send(g, [item(1)], 1.0)
        await until(lambda: b.model.batches == [[1.0]])


@pytest.mark.parametrize("what", ["no frame", "no work"])
async def test_message_that_is_not_understood_closes_its_edge(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench() as b:
        g, h = await b.connect("g"), await b.connect("h")
        if what == "no work":
            await g.send_with(inference_messages.Work((item(1),)), [])
        else:
            await g.world.send(torch.ones(9), dst=1, tag=FRAMES)
        await until(lambda: b.outboxes["g"].world.is_closed)
        assert "closed after an unexpected error" in caplog.text
        await send(h, [item(1, "h")], 5.0)
        assert await answers(h) == {1: 10.0}


# A model that hangs.


@asynccontextmanager
async def computing(
    monkeypatch: pytest.MonkeyPatch, compute_s: float | None
) -> AsyncIterator[tuple[Bench, Peer, list[int]]]:
    """Yield a worker that computes until its gate is set, and its exit codes."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda file: None)
    async with bench(compute_s=compute_s) as b:
        g = await b.connect("g")
        b.model.gate.clear()
        await send(g, [item(1, remaining_s=50.0)], 1.0)
        await until(b.model.is_computing.is_set)
        yield b, g, codes


@pytest.mark.parametrize(
    ("compute_s", "advance_s", "is_hung"),
    [
        (5.0, 4.0, False),
        (5.0, 6.0, True),
        (None, 31.0, False),
        (None, 59.0, False),
        (None, 61.0, True),
    ],
)
async def test_model_that_never_ends_ends_its_process(
    compute_s: float | None,
    advance_s: float,
    is_hung: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This happens at its limit, or once nobody can be waiting (here after 60 s)."""
    async with computing(monkeypatch, compute_s) as (b, _, codes):
        looks, is_paused, is_late = 0, False, False
        real = b.pauses.look

        def counted(now: float) -> bool:
            nonlocal looks, is_paused, is_late
            looks += 1
            if is_late:
                b.clock.advance(advance_s)
            # The look after the one that finds the pause is late, too.
            is_paused, is_late = False, is_paused
            return real(b.clock.now)

        monkeypatch.setattr(b.pauses, "look", counted)
        await until(lambda: looks > 0)
        # The next look is less than twice as late, so it is no pause of its own.
        b.clock.advance(0.6 * advance_s if is_hung else 1.0)
        is_paused, seen = True, looks
        await until(lambda: looks > seen + 2)
        assert (EXIT_HUNG in codes) == is_hung


async def test_request_that_nobody_waits_for_holds_no_hung_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client allowed a day, and then cancelled."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda file: None)
    async with bench() as b:
        g = await b.connect("g")
        b.model.gate.clear()
        await send(g, [item(1, remaining_s=86400.0)], 1.0)
        await until(b.model.is_computing.is_set)
        looks, real = 0, b.pauses.look

        def look(now: float) -> bool:
            nonlocal looks
            looks += 1
            return real(now)

        async def pass_time(seconds: int) -> None:
            for _ in range(2 * seconds):  # in steps that are no pauses
                awaited = looks + 1
                b.clock.advance(0.5)
                await until(partial(has_looked, awaited))

        def has_looked(count: int) -> bool:
            return looks >= count or bool(codes)

        monkeypatch.setattr(b.pauses, "look", look)
        await pass_time(45)
        assert codes == []
        await g.send(inference_messages.Cancel(key(1)))
        await pass_time(45)
        assert EXIT_HUNG in codes
        b.model.gate.set()


async def test_limit_of_a_computation_is_for_each_call_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failed batch, its requests are computed one by one."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    async with bench(compute_s=0.8) as b:
        g = await b.connect("g")
        rows: list[list[float]] = []

        def compute(tensors: Tensors) -> Tensors:
            rows.append(tensors["x"].tolist())
            for _ in range(20):  # the worker looks meanwhile
                time.sleep(0.02)
                b.clock.advance(0.02)
            if 13.0 in rows[-1]:
                raise InvalidRequestError("13 is refused")
            return tensors

        b.model.compute = compute
        await send(g, [item(n) for n in range(3)], 1.0, 13.0, 2.0)
        await until(lambda: len(rows) >= 4 or bool(codes))
        await settle()
        assert codes == []


@pytest.mark.parametrize("compute_s", [5.0, None])
async def test_pause_of_the_process_is_no_hang_of_its_model(
    compute_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was stopped during a computation until all deadlines had passed."""
    async with computing(monkeypatch, compute_s) as (b, g, codes):
        looks, real = 0, b.pauses.look

        def counted(now: float) -> bool:
            nonlocal looks
            looks += 1
            return real(now)

        monkeypatch.setattr(b.pauses, "look", counted)
        await until(lambda: looks > 0)
        b.clock.advance(1000.0)
        seen = looks
        await until(lambda: looks > seen + 2)
        assert codes == []
        b.model.gate.set()
        assert await answers(g) == {1: 2.0}
