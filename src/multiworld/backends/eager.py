"""Coroutines that begin at once, in the caller's turn of the loop.

What need not wait is then done without a task and without another turn. Python 3.12 has
this for tasks (``asyncio.eager_task_factory``); here it is for one call at a time, and
costs no task at all where nothing waits.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from typing import Any


class Rest:
    """What is left of a coroutine that has begun and waits; await it, once.

    Cancellation: reaches the coroutine as usual.
    """

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
    """Run a coroutine until it waits or ends; return what is left of it.

    It must not ask for the current task before it has waited.

    Raises:
        Exception: What the coroutine raised before it waited.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return Rest(coroutine, awaited)
