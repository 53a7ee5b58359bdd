"""Eager start of coroutines, in the caller's iteration of the event loop, so that a
coroutine that never waits needs no task. Pure. (Python 3.12 has
``asyncio.eager_task_factory``.)"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any


class Rest:
    """The rest of a coroutine that has started and waits; await it exactly once."""

    __slots__ = ("_awaited", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        awaited, coroutine = self._awaited, self._coroutine
        while True:
            try:
                sent = yield awaited
            except BaseException as error:
                step, value = coroutine.throw, error
            else:
                step, value = coroutine.send, sent  # type: ignore[assignment]
            try:
                awaited = step(value)
            except StopIteration:
                return


def begin(coroutine: Coroutine[Any, Any, None]) -> Rest | None:
    """Run a coroutine until it suspends or returns; return an awaitable of the rest."""
    # The coroutine must not call ``asyncio.current_task`` before it first waits: until
    # then it runs in the caller's task.
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return Rest(coroutine, awaited)
