"""The edges of a process, kept as the routing table demands. Shell.

Each edge has a task that stays in the edge's world while the table contains the edge.
It joins again after a fault (``WorldManager.keep``) and passes each incarnation to the
edge's owner.
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
"""Coroutine function that runs while an edge is up."""

Send = Callable[[], Coroutine[Any, Any, None]]

M = TypeVar("M")

SILENT_S = 0.4
"""Seconds of silence after which a replica's work is hedged: four heartbeats."""

RETRY_S = 1.0
"""Seconds before an edge that failed unexpectedly is opened again."""

SEND_S = 1.0
"""Most seconds to wait for queued messages when an edge is closed."""

OUTBOX_LIMIT = 4096
"""Most messages that wait to be sent on one edge. Windows and credits bound the
senders, so only a bug reaches this limit."""


class Outbox:
    """Queue of messages to send on one incarnation of an edge, in order.

    Args:
        edge: The edge.
        world: Its incarnation.
    """

    def __init__(self, edge: Edge, world: World) -> None:
        self.edge, self.world = edge, world
        self._peer = 1 - edge.rank
        self._queue: asyncio.Queue[Body] = asyncio.Queue()
        self._waiting = 0

    def send_nowait(self, codec: Codec[M], message: M) -> None:
        """Queue a small message."""
        text, tag = codec.encode(message), codec.tag
        self._put(lambda: self.world.send_object(text, dst=self._peer, tag=tag))

    def bundle_nowait(self, codec: Codec[M], header: M, tensors: Tensors) -> None:
        """Queue a header and its tensors.

        Args:
            codec: Codec of the header.
            header: Description of the tensors.
            tensors: Tensors, named by ``messages.pack``.
        """
        meta, tag = {HEADER: codec.encode(header)}, codec.tag
        self._put(
            lambda: self.world.send_bundle(tensors, dst=self._peer, meta=meta, tag=tag)
        )

    @property
    def is_idle(self) -> bool:
        """True if no message waits to be sent."""
        return self._waiting == 0

    def _put(self, send: Send) -> None:
        if self._waiting >= OUTBOX_LIMIT:
            logger.error("edge %s: outbox full, message dropped", self.edge.world)
            return
        rest: Body = send
        if self.is_idle:
            # Usually the socket takes the message at once and no task has to wake up.
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
        """Send queued messages until sending fails.

        Raises:
            WorldBrokenError: The world is broken.
            WorldClosedError: The world is closed.

        Cancellation: Withdraws the message that is being sent; queued ones stay unsent.
        """
        while True:
            send = await self._queue.get()
            try:
                await send()
            finally:
                self._waiting -= 1
                self._queue.task_done()

    async def wait_sent(self) -> None:
        """Wait until all queued messages were sent.

        Cancellation: Safe.
        """
        await self._queue.join()

    def silent_s(self) -> float:
        """Return the seconds since the peer's last sign of life."""
        return self.world.silent_s(self._peer) if self.world.is_ready else 0.0


def _constant(awaitable: Awaitable[None]) -> Body:
    return lambda: awaitable


def _raising(error: Exception) -> Body:
    """Return a body that raises ``error`` in the outbox's task."""

    async def body() -> None:
        raise error

    return body


class EdgeOwner(Protocol):
    """The user of a process's edges."""

    def edge_up(self, outbox: Outbox) -> list[Body]:
        """Handle a new incarnation; return coroutine functions to run while it is up.

        Args:
            outbox: Queue of messages to send on it.
        """

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        """Handle the end of an incarnation.

        Args:
            outbox: Its outbox.
            is_polite: True if the peer has left; False if it was lost, or if the table
                has no such edge any more.
        """


class EdgeKeeper:
    """The edges of one process.

    Args:
        manager: Manager of the worlds.
        store: Address of the store.
        config: Configuration of the worlds.
        owner: User of the edges.
    """

    def __init__(
        self, manager: WorldManager, store: str, config: WorldConfig, owner: EdgeOwner
    ) -> None:
        self._manager, self._store, self._config = manager, store, config
        self._owner = owner
        self._tasks: dict[Edge, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def apply(self, wanted: dict[str, Edge]) -> None:
        """Open missing edges and close the ones that are not in ``wanted``.

        Args:
            wanted: The edges that the process should have, by peer.
        """
        edges = set(wanted.values())
        for edge in [edge for edge in self._tasks if edge not in edges]:
            self._tasks.pop(edge).cancel()
        for edge in edges - self._tasks.keys():
            self._tasks[edge] = self._loop.create_task(
                self._keep(edge), name=f"multiworld {edge.world}"
            )

    async def close(self) -> None:
        """Send queued messages and close all edges.

        Cancellation: Safe; ``WorldManager.close`` closes the remaining edges.
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
        """Use one incarnation after another, until an unexpected error."""
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
            logger.exception("edge %s: retrying in %g s", edge.world, RETRY_S)

    async def _live(self, edge: Edge, world: World) -> None:
        """Let the owner use one incarnation until it ends or the peer has left."""
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
            # Messages that the peer sent before it left are still to be read.
            has_left = bool(world.left) and not world.is_broken
            try:
                await _drain(tasks, is_polite=has_left)
            finally:  # a table without the peer may cancel this at any moment
                # A peer that was removed from the table without having left was
                # given up; what it was computing may have killed it.
                has_left = bool(world.left) and not world.is_broken
                self._owner.edge_down(outbox, is_polite=has_left)


async def _until_over(body: Body, world: World) -> None:
    try:
        await body()
    except (WorldBrokenError, WorldClosedError):
        pass  # the keeper sees it
    except Exception:
        # A bug: nobody reads this edge any more, so close it.
        logger.exception("edge %s: closed after an unexpected error", world.name)
        await world.close()


async def _drain(tasks: list[asyncio.Task[None]], *, is_polite: bool) -> None:
    """Cancel the tasks of an incarnation; after a polite end, its readers finish."""
    if is_polite:
        await asyncio.wait(tasks[1:], timeout=0.5) if tasks[1:] else None
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("a task of an edge failed: %r", result, exc_info=result)
