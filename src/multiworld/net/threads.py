"""Blocking calls in threads of their own, which no process waits for at its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any


def in_thread(call: Callable[[], Any]) -> Awaitable[Any]:
    """Start ``call`` in a thread of its own; cancelling stops the wait only."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def complete(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(complete, result, failure)
        except RuntimeError:
            pass  # the loop has ended

    # Not in a pool: all threads of a pool could be waiting.
    threading.Thread(target=run, name="multiworld-call", daemon=True).start()
    return future
