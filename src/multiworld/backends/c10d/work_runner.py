"""Operations (``Work``) of a native group, awaited without blocking the event loop. A
collective completes a future; each send or receive blocks a thread. All waiters are
released when the world closes or breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from multiworld.backends.base import WorldView
from multiworld.backends.c10d import nccl
from multiworld.backends.c10d.groups import Group
from multiworld.errors import UnsupportedOperationError
from multiworld.incarnation.lifecycle import Failed
from multiworld.net.threads import in_thread, settle

# Seconds that collectives get to complete after a member has left: the member may have
# done its part in them before it left.
LEFT_GRACE_S = 1.0


class WorkRunner:
    """Runs the operations of one world's native group."""

    def __init__(self, view: WorldView, name: str) -> None:
        self._view, self.name = view, name
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[Any]] = set()
        # The collectives in ``_waiting``, with their numbers.
        self._collectives: dict[asyncio.Future[Any], int] = {}
        # Numbers of the collectives that were called and have not succeeded.
        self.unfinished: set[int] = set()
        # ``abandoned``: the rank that left, and the first collective that fails.
        self._abandoned: tuple[int, int] | None = None
        self._limit = timedelta(seconds=view.config.operation_s)
        self.group: Group | None = None  # None before it is made and after it is freed

    @property
    def is_busy(self) -> bool:
        """True while a caller waits for a work."""
        return bool(self._waiting)

    def fail_all(self) -> None:
        """Fail every waiter with the world's ``broken_error``."""
        for future in list(self._waiting):
            if not future.done():
                _fail(future, self._view.broken_error())

    def abandoned(self, rank: int, number: int) -> None:
        """Fail collective ``number``, during which a member left, and later ones."""
        # Gloo itself fails only at the ranks that exchange data with that member, so
        # fail the collective here.
        if self._abandoned is None or number < self._abandoned[1]:
            self._abandoned = rank, number
        waiting = [future for future, n in self._collectives.items() if n >= number]

        def fail() -> None:
            for future in waiting:
                if not future.done() and not self._view.is_broken:
                    _fail(future, self._view.left_error(rank))

        if waiting:
            self._loop.call_later(LEFT_GRACE_S, fail)

    async def carry_out(self, number: int, start: Callable[[Any], Any]) -> None:
        """Start a collective with ``start(native group)`` and wait for its end."""
        native = self.native()
        if self._abandoned is not None and number >= self._abandoned[1]:
            raise self._view.left_error(self._abandoned[0])
        try:
            work = start(native)
        except RuntimeError as error:
            await self._translate(error)
        if self.name == "nccl":
            await self._in_thread(lambda: nccl.wait_for(work, self._view.device))
            return
        future: asyncio.Future[None] = self._loop.create_future()

        def done(completed: Any) -> None:
            try:
                completed.value()
            except RuntimeError as error:
                settle(self._loop, future, error=error)
            else:
                settle(self._loop, future)

        try:
            work.get_future().add_done_callback(done)
        except (NotImplementedError, RuntimeError):
            await self._in_thread(work.wait)  # this backend's ``Work`` has no future
            return
        # Cancelling does not stop the native work, so the caller must break the world.
        self._collectives[future] = number
        try:
            await self._until(future)
        finally:
            del self._collectives[future]

    async def _until(self, future: asyncio.Future[Any]) -> None:
        self._waiting.add(future)
        try:
            await future
        except RuntimeError as error:
            await self._translate(error)
        finally:
            self._waiting.discard(future)

    async def _translate(self, error: RuntimeError) -> None:
        """Raise torch's error as an error of multiworld."""
        text = str(error)
        if "scalar type" in text or "not supported" in text.lower():
            raise UnsupportedOperationError(
                f"{self.name} does not support this: {text}; use backend='direct' for "
                "host tensors, or convert the tensor"
            ) from error
        self._view.trouble(None, text.partition(". This is typically")[0])
        await self._view.wait_incomplete()  # let the failure detector decide first
        if self._view.left and not self._view.is_broken:
            # The member left during the collective.
            raise self._view.left_error(min(self._view.left)) from error
        raise self._view.broken_error() from error

    async def wait_in_thread(self, start: Callable[[Any], Any]) -> None:
        """Start a send or receive and wait for its completion in a thread."""
        native = self.native()
        try:
            work = start(native)
            await self._in_thread(lambda: self._wait_for(work))
        except asyncio.CancelledError:
            self._view.report(
                Failed(
                    f"rank {self._view.rank} cancelled a {self.name} send or receive"
                )
            )
            raise
        except RuntimeError as error:
            await self._translate(error)

    async def _in_thread(self, call: Callable[[], Any]) -> None:
        await self._until(asyncio.ensure_future(in_thread(call)))

    def _wait_for(self, work: Any) -> None:
        if self.name == "nccl":
            nccl.wait_for(work, self._view.device)
        else:
            work.wait(self._limit)

    def native(self) -> Any:
        """Return the native group; raise ``broken_error`` if it is gone."""
        if self.group is None or self.group.native is None:
            raise self._view.broken_error()
        return self.group.native


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if isinstance(future, asyncio.Task):
        future.cancel()
    else:
        future.set_exception(error)
