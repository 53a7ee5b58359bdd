"""Keeps a process's edges as the table wants them. Shell.

Each edge has a task that stays in its world for as long as the table names it, joining
again after a fault (``WorldManager.keep``), and hands each incarnation to its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from multiworld.backends.eager import begin
from multiworld.config import WorldConfig
from multiworld.errors import MultiWorldError, WorldBrokenError, WorldClosedError
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.transport.messages import HEADER
from multiworld.serve.transport.protocol import Codec
from multiworld.serve.transport.routing_table import Edge
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")

Body = Callable[[], Awaitable[None]]
"""Something that runs while an edge lives."""

Send = Callable[[], Coroutine[Any, Any, None]]

M = TypeVar("M")

SILENT_S = 0.4
"""Seconds without a sign of a replica until its work is hedged: four heartbeats."""

RETRY_S = 1.0
SEND_S = 1.0
"""How long what was to be sent may take when an edge is left."""

OUTBOX_LIMIT = 4096
"""Messages that wait to be sent on one edge; what puts them there is bounded by windows
and credits, so this is reached by a bug only."""


class Outbox:
    """Sends on one incarnation of an edge, in order, without making anybody wait."""

    def __init__(self, edge: Edge, world: World) -> None:
        self.edge, self.world = edge, world
        self._peer = 1 - edge.rank
        self._queue: asyncio.Queue[Body] = asyncio.Queue()
        self._waiting = 0

    def send_nowait(self, codec: Codec[M], message: M) -> None:
        """Send a small message."""
        text, tag = codec.encode(message), codec.tag
        self._put(lambda: self.world.send_object(text, dst=self._peer, tag=tag))

    def bundle_nowait(self, codec: Codec[M], header: M, tensors: Tensors) -> None:
        """Send a header and its tensors.

        Args:
            codec: The conversation that it belongs to.
            header: What the tensors are.
            tensors: By the names that ``messages.pack`` gives them.
        """
        meta, tag = {HEADER: codec.encode(header)}, codec.tag
        self._put(
            lambda: self.world.send_bundle(tensors, dst=self._peer, meta=meta, tag=tag)
        )

    @property
    def is_idle(self) -> bool:
        """Whether all was sent."""
        return self._waiting == 0

    def _put(self, send: Send) -> None:
        if self._waiting >= OUTBOX_LIMIT:
            logger.error("edge %s: its outbox is full", self.edge.world)
            return
        rest: Body = send
        if self.is_idle:
            # Most often the socket takes it, and nobody has to be woken.
            try:
                left = begin(send())
            except Exception as error:
                rest = _raising(error)
            else:
                if left is None:
                    return
                rest = _constant(left)
        self._waiting += 1
        self._queue.put_nowait(rest)

    async def run(self) -> None:
        """Send until the world is over."""
        while True:
            send = await self._queue.get()
            try:
                await send()
            finally:
                self._waiting -= 1
                self._queue.task_done()

    async def wait_sent(self) -> None:
        """Wait until nothing waits.

        Cancellation: safe.
        """
        await self._queue.join()

    def silent_s(self) -> float:
        """Return for how long the peer has given no sign."""
        return self.world.silent_s(self._peer) if self.world.is_ready else 0.0


def _constant(awaitable: Awaitable[None]) -> Body:
    return lambda: awaitable


def _raising(error: Exception) -> Body:
    """Return what raises it where the world's end is waited for."""

    async def body() -> None:
        raise error

    return body


class EdgeOwner(Protocol):
    """What happens on the edges of a process."""

    def edge_up(self, outbox: Outbox) -> list[Body]:
        """Take note of a new incarnation; return what is to run while it lives."""

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        """Take note of its end."""


class EdgeKeeper:
    """The edges of one process."""

    def __init__(
        self, manager: WorldManager, store: str, config: WorldConfig, owner: EdgeOwner
    ) -> None:
        self._manager, self._store, self._config = manager, store, config
        self._owner = owner
        self._tasks: dict[Edge, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def apply(self, wanted: dict[str, Edge]) -> None:
        """Open what is missing and leave what is not wanted any more."""
        edges = set(wanted.values())
        for edge in [edge for edge in self._tasks if edge not in edges]:
            self._tasks.pop(edge).cancel()
        for edge in edges - self._tasks.keys():
            self._tasks[edge] = self._loop.create_task(
                self._keep(edge), name=f"multiworld {edge.world}"
            )

    async def close(self) -> None:
        """Leave all edges, what was sent before first.

        Cancellation: safe; what is left is dropped by ``WorldManager.close``.
        """
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep(self, edge: Edge) -> None:
        try:
            while True:
                await self._stay(edge)
                await asyncio.sleep(RETRY_S)
        finally:
            if edge.world in self._manager.worlds:
                await asyncio.shield(self._manager.leave(edge.world))

    async def _stay(self, edge: Edge) -> None:
        """Use one incarnation after the other, until an unexpected error."""
        try:
            async for world in self._manager.keep(
                edge.world,
                rank=edge.rank,
                size=2,
                store=self._store,
                config=self._config,
            ):
                await self._live(edge, world)
        except (MultiWorldError, OSError):
            logger.exception("edge %s: again in %g s", edge.world, RETRY_S)

    async def _live(self, edge: Edge, world: World) -> None:
        """Let the owner use one incarnation until it is over or the peer has left."""
        outbox = Outbox(edge, world)
        bodies = [outbox.run, *self._owner.edge_up(outbox)]
        tasks = [self._loop.create_task(_until_over(body, world)) for body in bodies]
        try:
            await world.wait_incomplete()
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(SEND_S):
                    await outbox.wait_sent()
            except TimeoutError:
                pass
            raise
        finally:
            # What the peer had sent before it left is still to be read.
            has_left = bool(world.left) and not world.is_broken
            try:
                await _drain(tasks, is_polite=has_left)
            finally:  # a table without the peer may cancel this at any moment
                # Who is left out of a table without a word was given up, and may have
                # been killed for what it computed.
                has_left = bool(world.left) and not world.is_broken
                self._owner.edge_down(outbox, is_polite=has_left)


async def _until_over(body: Body, world: World) -> None:
    try:
        await body()
    except (WorldBrokenError, WorldClosedError):
        pass  # the keeper sees it
    except Exception:
        # A bug, and nobody reads this edge any more: better none than a deaf one.
        logger.exception("on the edge %s", world.name)
        await world.close()


async def _drain(tasks: list[asyncio.Task[None]], *, is_polite: bool) -> None:
    """End the tasks of an incarnation; its readers read to the end first."""
    if is_polite:
        await asyncio.wait(tasks[1:], timeout=0.5) if tasks[1:] else None
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("on an edge: %r", result, exc_info=result)
