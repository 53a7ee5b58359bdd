"""Threads for large copies: what runs where, and what cancelling waits for."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from multiworld.backends.offload import OFFLOAD_BYTES, in_thread, offload, size_of
from tests.unit.waiting import turns, until


class Gate:
    """A call that waits in its thread until the test lets it go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.began, self.open, self.is_over = False, threading.Event(), False
        self._error = error

    def call(self) -> int:
        self.began = True
        assert self.open.wait(20)
        self.is_over = True
        if self._error is not None:
            raise self._error
        return 7


def test_size_counts_all_tensors() -> None:
    assert size_of(torch.ones(3), torch.ones(2, dtype=torch.int8)) == 14
    assert size_of(torch.empty(0)) == size_of() == 0


@pytest.mark.parametrize(
    ("size", "is_here"), [(0, True), (OFFLOAD_BYTES, True), (OFFLOAD_BYTES + 1, False)]
)
async def test_only_large_work_leaves_the_loop(size: int, is_here: bool) -> None:
    """A thread costs more than a short copy."""
    where = await offload(size, threading.get_ident)
    assert (where == threading.get_ident()) is is_here


@pytest.mark.parametrize("size", [0, OFFLOAD_BYTES + 1])
async def test_result_and_error_are_the_calls_own(size: int) -> None:
    """The caller cannot tell where the call ran."""
    assert await offload(size, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await offload(size, divmod, 7, 0)


async def test_loop_runs_while_a_thread_works() -> None:
    gate = Gate()
    working = asyncio.create_task(in_thread(gate.call))
    await until(lambda: gate.began)
    assert not working.done()
    gate.open.set()
    assert await working == 7


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_waits_for_the_thread(times: int) -> None:
    """Otherwise it would continue writing to memory that the caller reuses."""
    gate = Gate()
    working = asyncio.create_task(in_thread(gate.call))
    await until(lambda: gate.began)
    for _ in range(times):
        working.cancel()
        await turns(3)
        assert not working.done()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert gate.is_over


async def test_cancelling_hides_the_error_of_the_thread() -> None:
    """The caller gave up, so asyncio must not warn about a lost exception."""
    reported: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    gate = Gate(ValueError("late"))
    working = asyncio.create_task(in_thread(gate.call))
    await until(lambda: gate.began)
    working.cancel()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert gate.is_over
    del working
    await turns()
    assert reported == []


async def test_time_limit_ends_after_the_thread() -> None:
    """A timeout is a cancellation, too."""
    gate = Gate()
    limit = asyncio.create_task(_limited(gate))
    await until(lambda: gate.began)
    await asyncio.sleep(0.02)
    assert not limit.done()
    gate.open.set()
    with pytest.raises(TimeoutError):
        await limit


async def _limited(gate: Gate) -> None:
    async with asyncio.timeout(0.005):
        await in_thread(gate.call)


async def test_full_pool_of_the_loop_holds_up_no_copy() -> None:
    """The pool's calls may wait for the very message."""
    gate = Gate()
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    blocked = asyncio.create_task(asyncio.to_thread(gate.call))
    await until(lambda: gate.began)
    async with asyncio.timeout(20):
        assert await in_thread(lambda: 3) == 3
    gate.open.set()
    await blocked
