"""Worlds for programs that have no event loop.

Porting a send/recv loop takes a line or two::

    from multiworld import blocking

    with blocking.WorldManager() as manager:
        world = manager.join("w", rank=0, size=2, store="tcp://10.0.0.1:29500")
        while True:
            world.send(compute(world.recv(src=1)), dst=1)

Everything here may be called by any number of threads at once, but not from inside an
event loop; use ``multiworld.WorldManager`` there. The worlds run on an event loop in
the manager's own thread.

Operations take ``timeout_s``. After that time, or on Ctrl-C, the operation is
cancelled, with the effect that the same method of ``multiworld.World`` describes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from typing import Any, Generic, Self, TypeVar

from multiworld.config import WorldConfig
from multiworld.errors import (
    ConfigError,
    MultiWorldError,
    UsedAfterForkError,
    WorldClosedError,
)
from multiworld.incarnation.events import Event
from multiworld.net.security import Security
from multiworld.world import manager as _manager
from multiworld.world import world as _world
from multiworld.world.blocking_world import BlockingManager, BlockingWorld

__all__ = ["World", "WorldManager"]

T = TypeVar("T")

CLOSED = "this WorldManager was closed"

# Seconds for which a closing manager waits for the operations of other threads.
END_S = 10.0


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        self._lock = threading.Lock()
        self._operations: set[_Operation[Any]] = set()
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name="multiworld-loop", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, step: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        name = getattr(step, "__qualname__", "the operation")
        try:
            _check_outside_a_loop()
            self._check_process()
        except MultiWorldError:
            step.close()
            raise
        operation = self._begin(step)
        try:
            return self._result_of(operation, name, timeout_s)
        finally:
            self._operations.discard(operation)

    def _result_of(
        self, operation: _Operation[T], name: str, timeout_s: float | None
    ) -> T:
        try:
            return operation.ended.result(_bounded(timeout_s))
        except TimeoutError:
            operation.cancel()
            try:
                # The operation may have completed before the cancellation, or have
                # raised this TimeoutError itself.
                return operation.ended.result()
            except CancelledError:
                raise TimeoutError(
                    f"{name} did not finish within {timeout_s:g} s and was cancelled; "
                    "give a larger timeout_s"
                ) from None
        except CancelledError:
            if self._is_closed:
                raise WorldClosedError(CLOSED) from None
            raise
        except BaseException:  # e.g. KeyboardInterrupt
            operation.cancel()
            wait([operation.ended])
            raise

    @property
    def is_inherited(self) -> bool:
        """True in a forked child, which has no thread that runs the loop."""
        return os.getpid() != self._process

    def _check_process(self) -> None:
        if self.is_inherited:
            raise UsedAfterForkError(
                "this WorldManager belongs to the parent process; create one in the "
                "child"
            )

    def _begin(self, step: Coroutine[Any, Any, T]) -> _Operation[T]:
        with self._lock:
            if self._is_closed:
                step.close()
                raise WorldClosedError("this WorldManager is closed; create another")
            operation = _Operation(step, self._loop)
            self._operations.add(operation)
        return operation

    def close(self) -> None:
        with self._lock:  # no operation can begin from here on
            is_first, self._is_closed = not self._is_closed, True
        if not is_first:
            return
        # Cancel other threads' operations, so that none waits for ever.
        for operation in list(self._operations):
            operation.cancel()
        wait([operation.ended for operation in list(self._operations)], END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for operation in list(self._operations):
            operation.give_up()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class _Operation(Generic[T]):
    """A coroutine that runs as a task of the loop; ``ended`` settles at its end."""

    # ``run_coroutine_threadsafe`` is not used, because cancelling its future drops a
    # result that the task already has, and does not wait for the task.
    def __init__(
        self, step: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.ended: Future[T] = Future()
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._begin, step)

    def cancel(self) -> None:
        if not self.ended.done():
            self._loop.call_soon_threadsafe(self._cancel)

    def give_up(self) -> None:
        """Fail an operation that had not ended when its loop stopped."""
        with contextlib.suppress(InvalidStateError):
            self.ended.set_exception(WorldClosedError(CLOSED))

    def _begin(self, step: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(step)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


def _bounded(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)


def _check_outside_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(
        "thread",
        threading.current_thread().name,
        "multiworld.blocking must not be called from inside an event loop; use "
        "multiworld.WorldManager there",
    )


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


class World(BlockingWorld):
    """A world for threads; ``multiworld.World`` describes each method and attribute.

    Every operation raises the errors of the same method there, ``TimeoutError`` after
    ``timeout_s`` seconds (None: no limit), and ``ConfigError`` inside an event loop.
    """

    def __init__(self, world: _world.World, loop: _Loop) -> None:
        self._world, self._loop = world, loop
        self.name, self.epoch = world.name, world.epoch
        self.rank, self.size = world.rank, world.size

    def __repr__(self) -> str:
        return repr(self._world).replace("<World", "<blocking.World", 1)

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        return self._loop.call(step, timeout_s)

    def _next(
        self, step: Coroutine[Any, Any, _world.World], timeout_s: float | None
    ) -> Self:
        return type(self)(self._loop.call(step, timeout_s), self._loop)

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """Yield to code that uses ``process_group``; turn its errors into the world's::

            with world.named_errors():
                loss.backward()

        A ``RuntimeError`` of the backend becomes the error that names the lost member.
        """
        try:
            yield
        except RuntimeError as error:
            self._loop.call(self._world._await_verdict())
            self._world.raise_if_over(error)
            raise
        self._loop.call(self._world._await_device())


class WorldManager(BlockingManager[World]):
    """A manager for threads; ``multiworld.WorldManager`` describes each method in full.

    Use it with ``with``, or call ``close`` at the end. Inside an event loop, creating a
    manager or calling its methods raises ``ConfigError``.

    Args:
        enable_monitor, config, security: As for ``multiworld.WorldManager``.
    """

    def __init__(
        self,
        enable_monitor: bool = True,
        *,
        config: WorldConfig | None = None,
        security: Security | None = None,
    ) -> None:
        _check_outside_a_loop()
        self._loop = _Loop()

        async def make() -> _manager.WorldManager:
            return _manager.WorldManager(
                enable_monitor, config=config, security=security
            )

        try:
            self._manager = self._loop.call(make())
        except BaseException:
            self._loop.close()
            raise
        self._is_closed = False

    def __enter__(self) -> WorldManager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._manager).replace("<World", "<blocking.World", 1)

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        return self._loop.call(step, timeout_s)

    def _next(
        self, step: Coroutine[Any, Any, _world.World], timeout_s: float | None
    ) -> World:
        return World(self._loop.call(step, timeout_s), self._loop)

    def _each(self, worlds: AsyncIterator[_world.World]) -> Iterator[World]:
        with contextlib.suppress(WorldClosedError):  # the manager was closed
            for world in self._items(worlds):
                yield World(world, self._loop)

    def _items(self, items: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                item = self._loop.call(_next(items))
            except StopAsyncIteration:
                return
            yield item

    def events(self) -> Iterator[Event]:
        """Return an iterator that waits for each event, until the manager is closed."""

        async def subscribe() -> AsyncIterator[Event]:
            return self._manager.events()

        stream = self._loop.call(subscribe())

        def iterate() -> Iterator[Event]:
            # ``WorldClosedError``: the manager was closed, so no event follows.
            with contextlib.suppress(WorldClosedError):
                yield from self._items(stream)

        return iterate()

    def close(self) -> None:
        """Leave every world gracefully, free all resources, and end the thread."""
        if self._is_closed or self._loop.is_inherited:
            return
        _check_outside_a_loop()
        self._is_closed = True
        try:
            self._loop.call(self._manager.close())
        finally:
            self._loop.close()
