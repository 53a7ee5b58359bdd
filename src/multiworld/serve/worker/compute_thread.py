"""The thread in which a model computes."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class ComputeThread:
    """Runs functions one after the other, for an event loop.

    Half the cost of a ``ThreadPoolExecutor`` for each call. It is a daemon: a process
    ends, whatever its model still computes.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="multiworld model", daemon=True
        )
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what ``function`` returns.

        Raises:
            Exception: What it raises.

        Cancellation: the function runs to its end, for nobody.
        """
        if self._is_closed:
            raise RuntimeError("the model's thread has ended")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, function, args))
        return await future

    def close(self) -> None:
        """End after what runs, without waiting for it."""
        self._is_closed = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            result: Any = None
            error: BaseException | None = None
            try:
                result = function(*args)
            except StopIteration as problem:  # a future does not take it
                error = RuntimeError(f"the model raised StopIteration: {problem}")
            except BaseException as problem:
                error = problem
            try:
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed
                return
            # A tensor must not live until the next job comes.
            del job, future, function, args, result, error


def _settle(
    future: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    if future.done():  # cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
