"""Threads that run slow calls in fair order between tenants."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from multiworld.serve.queueing.fair_pool import FairPool
from multiworld.serve.queueing.fair_queue import Share

HANG_S = 20.0


class Calls:
    """Pool with one thread, which is busy until ``go`` is set."""

    def __init__(self) -> None:
        self.pool, self.ran = FairPool("test"), list[str]()
        self.go = threading.Event()
        self.busy = self.pool.submit(Share("x"), 1.0, lambda: self.go.wait(HANG_S))


def test_tenants_take_turns() -> None:
    calls = Calls()
    made = [
        calls.pool.submit(Share(name[0]), 1.0, partial(calls.ran.append, name))
        for name in ("a1", "a2", "a3", "a4", "b1")
    ]
    calls.go.set()
    for each in made:
        each.result(HANG_S)
    assert calls.ran.index("b1") <= 1
    assert [name for name in calls.ran if name != "b1"] == ["a1", "a2", "a3", "a4"]


def test_cancelled_call_does_not_run() -> None:
    calls = Calls()
    first = calls.pool.submit(Share("a"), 1.0, lambda: calls.ran.append("first"))
    second = calls.pool.submit(Share("a"), 1.0, lambda: calls.ran.append("second"))
    assert first.cancel()
    calls.go.set()
    second.result(HANG_S)
    assert calls.ran == ["second"]


def test_error_is_that_of_the_call() -> None:
    def fails() -> None:
        raise ValueError("as asked")

    pool = FairPool("test")
    with pytest.raises(ValueError, match="as asked"):
        pool.submit(Share(), 1.0, fails).result(HANG_S)
    assert pool.submit(Share(), 1.0, lambda: 3).result(HANG_S) == 3
