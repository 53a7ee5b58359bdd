"""Blocking calls in daemon threads, so that no process waits for them when it exits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any


def settle(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[Any],
    result: Any = None,
    error: Exception | None = None,
) -> None:
    """Settle a future of ``loop``, unless it is done; from any thread."""

    def complete() -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    try:
        loop.call_soon_threadsafe(complete)
    except RuntimeError:
        pass  # the event loop has stopped, so nothing waits for the future


def in_thread(call: Callable[[], Any]) -> Awaitable[Any]:
    """Start ``call`` in a thread of its own; cancelling stops only the wait.

    Raises:
        RuntimeError: ``call`` raised a ``BaseException`` such as ``SystemExit``, which
            would end the event loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            result = call()
        except Exception as error:
            settle(loop, future, error=error)
        except BaseException as error:
            # Code of the program, such as a callback, raised it.
            text = f"the call raised {type(error).__name__}: {error}"
            settle(loop, future, error=RuntimeError(text))
        else:
            settle(loop, future, result)

    # A thread of its own, because all threads of a pool could be waiting.
    threading.Thread(target=run, name="multiworld-call", daemon=True).start()
    return future
