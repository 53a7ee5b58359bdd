"""The edges of a process, which follow the routing table. For each edge in the table, a
task stays in the edge's world and passes each incarnation of the world to the owner."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from torch import Tensor

from multiworld import errors
from multiworld.backends.eager import begin
from multiworld.backends.offload import offload, size_of
from multiworld.config import WorldConfig
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.frames import Entry, lay_out, unpack
from multiworld.serve.wire.protocol import FRAMES, NOTHING
from multiworld.serve.wire.routing_table import Edge
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")

Body = Callable[[], Awaitable[None]]  # runs while an edge is up

BUG = "edge %s: closed after an unexpected error"

RETRY_S = 1.0  # seconds until an edge is reopened after an unexpected error
SEND_S = 1.0  # maximum seconds to send queued messages when an edge closes
FRAME_BYTES = 4 * 1024 * 1024  # a frame with this many bytes of tensors is full
FRAME_MESSAGES = 512  # maximum number of messages in a frame
# Maximum number of queued messages. Flow control (windows, credits) bounds those with
# tensors. After the loss of a replica, each of its sequences has a message or two
# without tensors, of some hundred bytes.
OUTBOX_LIMIT = 128 * 1024


class OutboxFullError(errors.MultiWorldError):
    """An edge has too many queued messages; it closes instead of dropping messages."""


class Outbox:
    """Messages queued for one incarnation of an edge, sent together in frames."""

    def __init__(self, edge: Edge, world: World) -> None:
        self.edge, self.world = edge, world
        self._peer = 1 - edge.rank
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Entry] = deque()
        self._is_due = False
        self._rest: Awaitable[None] | None = None
        self._resting: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._has_rest = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    def put(self, message: EdgeMessage, contents: Sequence[Tensors] = ()) -> None:
        """Queue a message for the next frame; drop it if the edge has failed."""
        self._queue(message, contents)
        if len(self._pending) >= FRAME_MESSAGES:
            self.flush()
        if self._pending and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def put_now(self, message: EdgeMessage, contents: Sequence[Tensors] = ()) -> None:
        """Queue a message, and send the whole queue immediately."""
        self._queue(message, contents)
        self.flush()

    def _queue(self, message: EdgeMessage, contents: Sequence[Tensors]) -> None:
        if self._failure is not None:
            return
        if len(self._pending) >= OUTBOX_LIMIT:
            text = f"edge {self.edge.world}: {OUTBOX_LIMIT} messages are queued"
            logger.error("%s; the edge is closed", text)
            self._fail(OutboxFullError(text))
            return
        self._pending.append((message, contents))

    @property
    def is_idle(self) -> bool:
        return not self._pending and self._rest is None

    def flush(self) -> None:
        """Send what the connection accepts now; usually everything, without waiting."""
        while self._pending and self._rest is None:
            try:
                self._rest = begin(self._send(self._next()))
            except Exception as error:
                self._fail(error)
            if self._rest is not None:
                self._has_rest.set()
        if self._waiters and self.is_idle:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        """Stop sending, and make ``run`` raise the error."""
        self._failure = error
        self._pending.clear()
        self._has_rest.set()
        if self._resting is not None:
            self._resting.cancel()  # the peer may never receive the frame

    def _turn(self) -> None:
        self._is_due = False
        self.flush()

    def _next(self) -> list[Entry]:
        entries: list[Entry] = []
        size = 0
        while self._pending and size < FRAME_BYTES and len(entries) < FRAME_MESSAGES:
            entry = self._pending.popleft()
            entries.append(entry)
            for tensors in entry[1]:
                size += size_of(*tensors.values())
        return entries

    async def _send(self, entries: list[Entry]) -> None:
        frame = lay_out(entries)
        packed = await offload(frame.size, frame.pack)
        await self.world.send(packed, dst=self._peer, tag=FRAMES)

    async def run(self) -> None:
        """Finish sends that did not complete at once, until the edge fails."""
        while True:
            await self._has_rest.wait()
            self._has_rest.clear()
            if self._rest is not None:
                # Cancelling this task withdraws the frame and leaves later ones unsent.
                self._resting = asyncio.ensure_future(self._rest)
                try:
                    await self._resting
                except asyncio.CancelledError:
                    if self._failure is None:
                        raise
                except Exception as error:
                    self._fail(error)
                self._rest = self._resting = None
            self.flush()
            if self._failure is not None:
                raise self._failure

    async def wait_sent(self) -> None:
        self.flush()
        if not self.is_idle:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def silent_s(self) -> float:
        return self.world.silent_s(self._peer) if self.world.is_ready else 0.0

    async def wait_end(self) -> None:
        """Wait until the peer has left and its messages are handled; always raises."""
        await self.world.recv_object(src=self._peer, tag=NOTHING)


class EdgeOwner(Protocol):
    """The user of a process's edges."""

    def edge_up(self, outbox: Outbox) -> None:
        """Start using an incarnation; ``outbox`` sends on it."""

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Handle the messages of a frame that arrived on this incarnation."""

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        """Stop using an incarnation; ``is_polite``: the peer left and was not lost."""


class Edges:
    def __init__(
        self, manager: WorldManager, store: str, config: WorldConfig, owner: EdgeOwner
    ) -> None:
        self._manager, self._store, self._config = manager, store, config
        self._owner = owner
        self._tasks: dict[Edge, asyncio.Task[None]] = {}
        self._loop = asyncio.get_running_loop()

    def apply(self, wanted: dict[str, Edge]) -> None:
        """Open and close edges to match ``wanted``, the edges by peer."""
        edges = set(wanted.values())
        for edge in [edge for edge in self._tasks if edge not in edges]:
            self._tasks.pop(edge).cancel()
        for edge in edges - self._tasks.keys():
            self._tasks[edge] = self._loop.create_task(
                self._keep(edge), name=f"multiworld {edge.world}"
            )

    async def close(self) -> None:
        """Send queued messages and close all edges."""
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
        """Join one incarnation after another, until an unexpected error."""
        try:
            async for world in self._manager.keep(
                edge.world,
                rank=edge.rank,
                size=2,
                store=self._store,
                config=self._config,
            ):
                await self._live(edge, world)
        except (errors.MultiWorldError, OSError):
            logger.exception("edge %s: retrying in %g s", edge.world, RETRY_S)

    async def _live(self, edge: Edge, world: World) -> None:
        """Let the owner use one incarnation until it ends or the peer has left."""
        outbox = Outbox(edge, world)
        self._owner.edge_up(outbox)
        tasks = [
            self._loop.create_task(_until_over(body, world))
            for body in (outbox.run, outbox.wait_end)
        ]
        try:
            listen(outbox, self._owner)
            await world.wait_incomplete()
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(SEND_S):
                    await outbox.wait_sent()
            except TimeoutError:
                pass
            raise
        finally:
            # Messages that the peer sent before it left must still be read.
            has_left = bool(world.left) and not world.is_broken
            try:
                await _drain(tasks, is_polite=has_left)
            finally:  # a routing table without the peer may cancel the drain
                # A peer that the table dropped before the peer left counts as lost,
                # because the work that it was computing may have killed it.
                has_left = bool(world.left) and not world.is_broken
                self._owner.edge_down(outbox, is_polite=has_left)


def listen(outbox: Outbox, owner: EdgeOwner) -> None:
    """Pass arriving frames to the owner; an unexpected error closes the edge."""
    world, loop = outbox.world, asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []

    def handle(packed: Tensor | memoryview) -> None:
        if closing:
            return
        try:
            owner.received(outbox, unpack(packed))
        except Exception:
            # A bug, here or at the peer: this edge can no longer be trusted.
            logger.exception(BUG, world.name)
            closing.append(loop.create_task(world.close()))

    try:
        world.handle(handle, src=1 - outbox.edge.rank, tag=FRAMES, peek=handle)
    except (errors.WorldBrokenError, errors.WorldClosedError):
        pass  # the incarnation has already ended


async def _until_over(body: Body, world: World) -> None:
    try:
        await body()
    except (errors.WorldBrokenError, errors.WorldClosedError, errors.MemberLeftError):
        pass  # ``Edges`` handles the end of the incarnation
    except Exception:
        logger.exception(BUG, world.name)
        await world.close()


async def _drain(tasks: list[asyncio.Task[None]], *, is_polite: bool) -> None:
    """Read what a peer sent before it left, then cancel an incarnation's tasks."""
    if is_polite:
        await asyncio.wait(tasks[1:], timeout=0.5)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            logger.error("a task of an edge failed: %r", result, exc_info=result)
