"""Edges on the memory backend, whose other process the tests play."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from threading import Thread
from typing import Any, TypeVar

from torch import Tensor

from multiworld.serve.replica.batches.executor import Executor
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.frames import Entry, lay_out, unpack
from multiworld.serve.wire.protocol import FRAMES, Codec
from multiworld.serve.wire.routing_table import Edge
from multiworld.testing import Arena
from multiworld.world.world import World

M = TypeVar("M")

HANG_S = 10.0
"""Seconds after which a step of a test counts as hung."""


async def until(is_so: Callable[[], object]) -> None:
    """Let the other tasks run until `is_so`."""
    async with asyncio.timeout(HANG_S):
        while not is_so():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def settle() -> None:
    """Let every task run until all of them wait."""
    for _ in range(50):
        await asyncio.sleep(0)


async def break_world(world: World) -> None:
    """Break a world for all its members, as the loss of one does."""
    collective = asyncio.ensure_future(world.barrier())
    await settle()
    collective.cancel()
    await asyncio.gather(collective, return_exceptions=True)
    assert world.is_broken


async def close_executor(executor: Executor, thread: Thread | None) -> None:
    """Close an executor and wait for the thread in which it has loaded its stage.

    Python 3.11 cannot parse a traceback's source in two threads at once, and pytest
    does so after a failure.
    """
    executor.close()
    if thread is not None:
        await asyncio.to_thread(thread.join, HANG_S)


class QuietOutbox(Outbox):
    """An outbox whose peer has been silent for `quiet_s` seconds."""

    quiet_s = 0.0

    def silent_s(self) -> float:
        return self.quiet_s

    def hold(self, sending: Awaitable[Any]) -> None:
        """Send nothing more until `sending` is done."""
        self._rest = sending
        self._has_rest.set()


class Controller:
    """The other process of a control world; `rank` is the process under test."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self._rank = world, rank

    async def send(self, codec: Codec[M], message: M) -> None:
        await self.world.send_object(codec.encode(message), dst=self._rank)

    async def receive(self, codec: Codec[M]) -> M:
        async with asyncio.timeout(HANG_S):
            return codec.decode(await self.world.recv_object(src=self._rank))

    async def has_sent(self, codec: Codec[M]) -> bool:
        """Return whether the process under test has sent a message of this kind."""
        waiting = asyncio.ensure_future(self.receive(codec))
        await settle()
        is_there = waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return is_there


class Peer:
    """The other process of an edge; `rank` is the process under test."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self._rank = world, rank
        self._arrived: deque[Entry] = deque()
        world.handle(self._take, src=rank, tag=FRAMES)

    def _take(self, packed: Tensor) -> None:
        self._arrived.extend(unpack(packed))

    async def send(self, *messages: EdgeMessage) -> None:
        """Send messages without tensors, in one frame."""
        await self._send([(message, ()) for message in messages])

    async def send_with(
        self, message: EdgeMessage, contents: Sequence[Tensors]
    ) -> None:
        await self._send([(message, contents)])

    async def _send(self, entries: list[Entry]) -> None:
        await self.world.send(lay_out(entries).pack(), dst=self._rank, tag=FRAMES)

    async def receive(self, kind: Any) -> Any:
        """Return the next message of a type, or of a union of types."""
        message, _ = await self.receive_with(kind)
        return message

    async def receive_with(self, kind: Any) -> tuple[Any, Sequence[Tensors]]:
        """Return the next message of this kind, and the tensors of its items."""
        await until(lambda: self._find(kind) is not None)
        entry = self._find(kind)
        assert entry is not None
        self._arrived.remove(entry)
        return entry

    async def has_sent(self, kind: Any) -> bool:
        """Return whether the process under test has sent a message of this kind."""
        await settle()
        return self._find(kind) is not None

    def _find(self, kind: Any) -> Entry | None:
        return next((e for e in self._arrived if isinstance(e[0], kind)), None)


async def connect(arena: Arena, edge: Edge) -> tuple[QuietOutbox, Peer]:
    """Return this process's end of an edge, and the peer at its other end."""
    worlds = await arena.world(2, edge.world)
    return QuietOutbox(edge, worlds[edge.rank]), Peer(worlds[1 - edge.rank], edge.rank)
