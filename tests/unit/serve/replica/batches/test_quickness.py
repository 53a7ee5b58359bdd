"""Quick stages, which are computed on the event loop without an announcement."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
from typing import Any

import pytest

from multiworld.serve.replica import hang_guard
from multiworld.serve.replica.batches import credit_returns
from multiworld.serve.replica.batches.executor import (
    QUICK_S,
    SLOW_S,
    WARM,
    Quickness,
)
from multiworld.serve.replica.hang_guard import EXIT_HUNG, HangGuard
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.inference_messages import Credit, Note
from tests.unit.serve.edges import settle, until
from tests.unit.serve.replica.batches.test_worker import (
    Bench,
    answers,
    begun,
    bench,
    handed,
    item,
    key,
    send,
)


def test_stage_is_quick_once_enough_batches_took_little_time() -> None:
    """One slow batch restarts the count, and a slow mean ends quickness."""
    measure = Quickness()
    for _ in range(WARM):
        assert not measure.is_quick
        measure.add(QUICK_S / 2)
    assert measure.is_quick
    measure.add(SLOW_S * 1.01)
    assert not measure.is_quick
    for _ in range(WARM):
        measure.add(QUICK_S / 2)
    assert measure.is_quick
    for _ in range(WARM):
        measure.add(QUICK_S * 4)
    assert not measure.is_quick


def quicken(b: Bench) -> None:
    """Make the worker treat its stage as quick, however busy the machine is."""
    for _ in range(WARM):
        b.quickness.add(0.0)
    measured: Any = b.quickness
    measured.add = lambda took_s: None


async def test_quick_batch_is_computed_on_the_loop_and_not_announced() -> None:
    threads: list[str] = []
    async with bench() as b:
        g = await b.connect("g")
        real = b.model.compute

        def compute(tensors: Any) -> Any:
            threads.append(threading.current_thread().name)
            return real(tensors)

        b.model.compute = compute
        quicken(b)
        await send(g, [item(1), item(2)], 3.0, 4.0)
        assert await answers(g) == {1: 6.0, 2: 8.0}
        assert threads == [threading.main_thread().name]
        assert not await g.has_sent(Note)
        assert b.worker.report().counts["batches"] == 1


async def test_calm_quick_stage_computes_work_as_it_arrives() -> None:
    """No task has to wake up; under load, waiting lets a batch grow."""
    tasks: list[asyncio.Task[Any] | None] = []
    async with bench() as b:
        g = await b.connect("g")
        real = b.model.compute

        def compute(tensors: Any) -> Any:
            tasks.append(asyncio.current_task())
            return real(tensors)

        b.model.compute = compute
        quicken(b)
        await settle()
        for number, calm_s in enumerate((1.0, 0.0, 1.0)):
            b.clock.advance(calm_s)
            await send(g, [item(number)], 3.0)
            assert await answers(g) == {number: 6.0}
            await settle()
        (run, _) = b.own
        # The memory backend passes a message on in the task that sends it.
        assert [task is run for task in tasks] == [False, True, False]
        assert tasks[0] is asyncio.current_task()


@pytest.mark.parametrize("is_isolated", [True, False])
async def test_what_a_calm_quick_stage_cannot_compute_at_once_goes_to_its_thread(
    is_isolated: bool,
) -> None:
    """This is a suspect, or a request that fails."""
    async with bench() as b:
        g = await b.connect("g")
        quicken(b)
        await settle()
        b.clock.advance(1.0)
        await send(g, [item(1, is_isolated=is_isolated)], 3.0 if is_isolated else 13.0)
        assert not b.worker.is_idle
        await send(g, [item(2)], 4.0)
        assert await begun(g) == ((1, 1),)
        if is_isolated:
            assert await answers(g) == {1: 6.0}
        else:
            assert (await g.receive(Note)).attempt == (1, 1)
        assert await answers(g) == {2: 8.0}
        assert b.worker.is_idle


async def test_suspect_at_a_quick_stage_is_announced_and_computed_alone() -> None:
    """If it kills the replica, the gateway must know."""
    async with bench() as b:
        g = await b.connect("g")
        quicken(b)
        await send(g, [item(1, is_isolated=True), item(2)], 3.0, 4.0)
        assert await begun(g) == ((1, 1),)
        found = {**await answers(g), **await answers(g)}
        assert found == {1: 6.0, 2: 8.0}
        assert not await g.has_sent(Note)


async def test_request_that_fails_at_a_quick_stage_fails_alone() -> None:
    async with bench(is_started=False) as b:
        g = await b.connect("g")
        quicken(b)
        await send(g, [item(1), item(2)], 13.0, 4.0)
        await until(lambda: b.worker.report().queued == 2)
        b.start()
        assert await begun(g) == ((1, 1), (2, 1))
        failed = await g.receive(Note)
        assert isinstance(failed, inference_messages.WorkFailed)
        assert failed.attempt == (1, 1)
        assert await answers(g) == {2: 8.0}
        assert b.executor.is_quick


async def test_stage_that_works_in_its_own_thread_only_is_left_there() -> None:
    """For example, it opened a database or runs its own event loop."""
    async with bench() as b:
        g = await b.connect("g")
        real = b.model.compute

        def compute(tensors: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                raise RuntimeError("not in this thread")
            return real(tensors)

        b.model.compute = compute
        quicken(b)
        await send(g, [item(1)], 3.0)
        assert await begun(g) == ((1, 1),)
        assert await answers(g) == {1: 6.0}
        assert not b.executor.is_quick
        quicken(b)
        assert not b.executor.is_quick


async def test_credit_of_quick_work_is_returned_together_after_its_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then, the sender reports the work as lost or stuck with this replica."""
    monkeypatch.setattr(credit_returns, "RELEASE_S", 0.05)
    async with bench(1, 3, "0-a", "2-a", max_ongoing_requests=32) as b:
        await b.connect("g")
        upstream, downstream = await b.connect("0-a"), await b.connect("2-a")
        quicken(b)
        for number in (1, 2, 3):
            await send(upstream, [item(number)], float(number))
            assert await handed(downstream) == {key(number): 2.0 * number}
        released = await upstream.receive(Credit)
        assert released == inference_messages.CreditReleased((key(1), key(2), key(3)))


async def test_credit_is_returned_at_once_when_much_is_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender must not wait for the timer when its credit runs out."""
    monkeypatch.setattr(credit_returns, "RELEASE_S", 1e6)
    async with bench(1, 2, "0-a", own_ongoing_requests=8) as b:
        await b.connect("g")
        upstream = await b.connect("0-a")
        quicken(b)
        for number in (1, 2):
            await send(upstream, [item(number)], float(number))
        released = await upstream.receive(Credit)
        assert released == inference_messages.CreditReleased((key(1), key(2)))


async def test_loop_serves_its_other_tasks_between_quick_batches() -> None:
    """Endless work must not starve them."""
    async with bench(max_batch_size=1) as b:
        g = await b.connect("g")
        quicken(b)
        count = 300
        turns = 0
        await send(g, [item(n) for n in range(count)], *[1.0] * count)

        async def other() -> None:
            nonlocal turns
            while b.worker.report().counts.get("batches", 0) < count:
                turns += 1
                await asyncio.sleep(0)

        await other()
        assert turns > count / 4
        for _ in range(count):
            await answers(g)


async def test_quick_stage_that_hangs_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blocked loop cannot check for hangs, so a thread does."""
    codes: list[int] = []
    hangs = threading.Event()

    def ended(code: int) -> None:
        codes.append(code)
        hangs.set()

    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda file: None)
    monkeypatch.setattr(hang_guard, "GUARD_S", 0.01)
    async with bench(compute_s=1.0) as b:
        g = await b.connect("g")

        def hang(tensors: Any) -> Any:
            b.clock.advance(2.0)
            assert hangs.wait(10.0)
            return tensors

        b.model.compute = hang
        quicken(b)
        await send(g, [item(1)], 3.0)
        await until(lambda: codes[:1] == [EXIT_HUNG])
        await settle()


def test_guard_starts_one_thread() -> None:
    before = threading.active_count()
    guard = HangGuard(lambda resumed_at: None)
    for _ in range(3):
        guard.start()
    assert threading.active_count() == before + 1
