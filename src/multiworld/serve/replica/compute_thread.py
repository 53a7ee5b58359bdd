"""Thread that runs a model for an event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]


class ComputeThread:
    """Runs functions one after the other in one separate thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        # Not a ``ThreadPoolExecutor``, because a call then takes twice as long. The
        # thread is a daemon, so that the process can exit while the model computes.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="multiworld model", daemon=True
        )
        self._thread.start()

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` in the thread; cancelling only drops its result."""
        if self._is_closed:
            raise RuntimeError("compute thread is closed; create a new one")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((future, function, args))
        return await future

    def close(self) -> None:
        """Stop the thread after the queued calls, without waiting for it."""
        self._is_closed = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            result: Any = None
            error: BaseException | None = None
            try:
                result = function(*args)
            except StopIteration as problem:  # a future does not accept a StopIteration
                error = RuntimeError(f"model raised StopIteration: {problem}")
            except BaseException as problem:
                error = problem
            try:
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:  # the loop is closed
                return
            # Free the tensors now, not when the next job arrives.
            del job, future, function, args, result, error


def _settle(
    future: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    if future.done():  # the call was cancelled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
