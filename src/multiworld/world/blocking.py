"""Worlds for programs that have no event loop. Shell.

An existing send/recv loop changes in a line or two::

    from multiworld import blocking

    with blocking.WorldManager() as manager:
        world = manager.join("w", rank=0, size=2, store="tcp://10.0.0.1:29500")
        while True:
            world.send(compute(world.recv(src=1)), dst=1)

Which thread may call what: everything in this module may be called from any thread, by
several at once, but not from inside an event loop (use ``multiworld.WorldManager``
there). The worlds live on a loop in a thread of the manager's own. Everything else in
``multiworld`` belongs to the thread of the loop it was made on.

Each call takes ``timeout_s``; when it has passed, the operation is cancelled (what that
means is on the same method of ``multiworld.World``) and ``TimeoutError`` is raised.
Ctrl-C cancels likewise.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from multiworld.backends.base import Bundle
from multiworld.config import WorldConfig
from multiworld.errors import ConfigError
from multiworld.incarnation.events import Event
from multiworld.net.security import Security
from multiworld.world import manager as _manager
from multiworld.world import world as _world
from multiworld.world.blocking_collectives import BlockingCollectives
from multiworld.world.world import WorldStatistics

__all__ = ["World", "WorldManager"]

T = TypeVar("T")


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, name="multiworld-loop", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, step: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``step`` on the loop and wait for it."""
        try:
            _check_outside_a_loop()
        except ConfigError:
            step.close()
            raise
        future = asyncio.run_coroutine_threadsafe(step, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if not future.done():
                self._cancel(future)
                raise TimeoutError(f"not done within {timeout_s:g} s") from None
            raise
        except BaseException:
            if not future.done():
                self._cancel(future)
            raise

    def _cancel(self, future: Future[Any]) -> None:
        """Cancel, and wait until the operation has seen it."""
        future.cancel()
        settled = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        settled.result()

    def close(self) -> None:
        """Stop the loop and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


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


class World(BlockingCollectives):
    """A world for threads; see ``multiworld.World`` for what each method does."""

    def __init__(self, world: _world.World, loop: _Loop) -> None:
        super().__init__(world)
        self._world, self._loop = world, loop
        self.name, self.epoch = world.name, world.epoch
        self.rank, self.size = world.rank, world.size

    def __repr__(self) -> str:
        return repr(self._world).replace("<World", "<blocking.World", 1)

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        return self._loop.call(step, timeout_s)

    @property
    def is_ready(self) -> bool:
        """True while traffic may flow."""
        return self._world.is_ready

    @property
    def is_broken(self) -> bool:
        """True once something outside has ended it."""
        return self._world.is_broken

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have left politely."""
        return self._world.left

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group; see ``multiworld.World.process_group``."""
        return self._world.process_group

    def device_mesh(self, dim_name: str = "world") -> Any:
        """Return a DeviceMesh; see ``multiworld.World.device_mesh``."""
        return self._world.device_mesh(dim_name)

    def statistics(self) -> WorldStatistics:
        """Return a snapshot."""
        return self._world.statistics()

    def send(
        self, tensor: Tensor, *, dst: int, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Send one tensor."""
        self._loop.call(self._world.send(tensor, dst=dst, tag=tag), timeout_s)

    def recv(
        self,
        out: Tensor | None = None,
        *,
        src: int,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Receive one tensor."""
        return self._loop.call(self._world.recv(out, src=src, tag=tag), timeout_s)

    def recv_any(
        self,
        out: Tensor | None = None,
        *,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[int, Tensor]:
        """Receive one tensor from whichever member is first."""
        return self._loop.call(self._world.recv_any(out, tag=tag), timeout_s)

    def send_bundle(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dst: int,
        meta: Mapping[str, Any] | None = None,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Send several named tensors and metadata as one message."""
        step = self._world.send_bundle(tensors, dst=dst, meta=meta, tag=tag)
        self._loop.call(step, timeout_s)

    def recv_bundle(
        self,
        *,
        src: int | None = None,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> Bundle:
        """Receive what ``send_bundle`` sent."""
        return self._loop.call(self._world.recv_bundle(src=src, tag=tag), timeout_s)

    def send_object(
        self, obj: Any, *, dst: int, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Send small plain data."""
        self._loop.call(self._world.send_object(obj, dst=dst, tag=tag), timeout_s)

    def recv_object(
        self,
        *,
        src: int | None = None,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """Receive what ``send_object`` sent."""
        return self._loop.call(self._world.recv_object(src=src, tag=tag), timeout_s)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks known to be lost."""
        return self._world.lost

    def wait_over(self, timeout_s: float | None = None) -> None:
        """Wait until the world is broken or closed."""
        self._loop.call(self._world.wait_over(), timeout_s)

    def wait_incomplete(self, timeout_s: float | None = None) -> None:
        """Wait until the world is broken or closed, or a member has left."""
        self._loop.call(self._world.wait_incomplete(), timeout_s)

    def reform(self) -> World:
        """Go on in a smaller world, without the lost."""
        return World(self._loop.call(self._world.reform()), self._loop)

    def grow(self, *, to: int) -> World:
        """Let newcomers into this world."""
        return World(self._loop.call(self._world.grow(to=to)), self._loop)

    def close(self) -> None:
        """Leave politely."""
        self._loop.call(self._world.close())


class WorldManager:
    """A manager for threads; see ``multiworld.WorldManager``.

    Use it with ``with``, or call ``close``.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._manager).replace("<World", "<blocking.World", 1)

    def join(
        self,
        name: str,
        *,
        rank: int | None = None,
        size: int | None = None,
        store: str | None = None,
        backend: str = "direct",
        config: WorldConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> World:
        """Join a world and wait until every member has done so."""
        step = self._manager.join(
            name,
            rank=rank,
            size=size,
            store=store,
            backend=backend,
            config=config,
            device=device,
        )
        return World(self._loop.call(step), self._loop)

    def keep(
        self,
        name: str,
        *,
        rank: int | None = None,
        size: int | None = None,
        store: str | None = None,
        backend: str = "direct",
        config: WorldConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> Iterator[World]:
        """Stay in a world: yield it, and its next incarnation whenever it is over."""
        worlds = self._manager.keep(
            name,
            rank=rank,
            size=size,
            store=store,
            backend=backend,
            config=config,
            device=device,
        )
        while True:
            try:
                world = self._loop.call(_next(worlds))
            except StopAsyncIteration:
                return
            yield World(world, self._loop)

    def leave(self, name: str) -> None:
        """Leave one world politely and forget it."""
        self._loop.call(self._manager.leave(name))

    def events(self) -> Iterator[Event]:
        """Iterate over what happens to the worlds from now on, waiting for it.

        Subscribes when it is called. Ends when the manager is closed.
        """

        async def subscribe() -> Any:
            return self._manager.events()

        stream = self._loop.call(subscribe())

        async def following() -> Event | None:
            return await anext(stream, None)

        def iterate() -> Iterator[Event]:
            while (event := self._loop.call(following())) is not None:
                yield event

        return iterate()

    def close(self) -> None:
        """Leave every world politely, free everything, and end the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._loop.call(self._manager.close())
        finally:
            self._loop.close()
