"""Threads that run slow calls in fair order among tenants."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from multiworld.serve.queueing.fair_queue import FairQueue, Share

T = TypeVar("T")


class FairPool:
    def __init__(self, name: str, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._queue: FairQueue[int] = FairQueue()
        self._calls: dict[int, tuple[Future[Any], Callable[[], Any]]] = {}
        self._numbers = itertools.count()

    def submit(self, share: Share, cost: float, call: Callable[[], T]) -> Future[T]:
        """Run a call in fair order, unless its future is cancelled first."""
        made: Future[T] = Future()
        with self._lock:
            number = next(self._numbers)
            self._calls[number] = made, call
            self._queue.put(number, share, cost, number)
        made.add_done_callback(lambda _: self._forget(number))
        self._pool.submit(self._run_next)
        return made

    def _forget(self, number: int) -> None:
        """Drop a call if it was cancelled while it waited."""
        with self._lock:
            if self._calls.pop(number, None) is not None:
                self._queue.drop(number)

    def _run_next(self) -> None:
        with self._lock:
            number = self._queue.next()
            if number is None:
                return  # the call was cancelled
            self._queue.take(number)
            made, call = self._calls.pop(number)
        if not made.set_running_or_notify_cancel():
            return
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)
