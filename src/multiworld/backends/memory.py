"""The ``memory`` backend: several ranks inside one process, for tests. With
``WorldConfig(eager_bytes=0)`` every send waits until it is received (rendezvous), which
finds programs that depend on buffering."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import torch

from multiworld.backends.arrivals import Arrival, Description
from multiworld.backends.base import ErrorMaker
from multiworld.backends.channel import TURN_MESSAGES, Channel
from multiworld.backends.channel import Lane as AnyLane
from multiworld.backends.dtypes import DTYPES, memory_of
from multiworld.backends.header import TENSOR
from multiworld.backends.message_backend import COLLECTIVE, P2P, MessageBackend
from multiworld.backends.offload import in_thread

_Key = tuple[int, int]  # nonce, rank
_backends: weakref.WeakValueDictionary[_Key, MemoryBackend] = (
    weakref.WeakValueDictionary()
)


class MemoryLane:
    """Lane from one member to the mailbox of another, on channel ``name``."""

    is_held = True  # so that receives neither poll nor spin
    is_dead = is_arriving = False

    def __init__(self, owner: MemoryBackend, peer: int, name: str) -> None:
        self.rank = peer
        self._owner, self._name = owner, name
        self._refusal: ErrorMaker | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._messages = 0
        self.is_finished = False

    def fileno(self) -> int:
        return -1

    async def send(
        self, description: Description, memory: memoryview, owner: object
    ) -> None:
        """Deliver a copy of a message; above ``eager_bytes``, wait for its receive."""
        if self._refusal is not None:
            raise self._refusal()
        other = self._owner.peer(self.rank)
        if other is None:  # the peer is gone; wait until ``fail_sends`` sets the error
            await self._wait(asyncio.get_running_loop().create_future())
            return
        copy = torch.empty(description.size, dtype=torch.uint8)
        memory_of(copy)[:] = memory
        if description.kind == TENSOR:
            copy = copy.view(DTYPES[description.dtype]).view(description.shape)
        mailbox = other.channel(self._name).mailbox
        arrival = mailbox.deliver(self._owner.rank, description, copy)
        is_taken = arrival.receive is not None or arrival.handler is not None
        if description.size > self._owner.eager_bytes and not is_taken:
            await self._wait_taken(other, arrival)
        self._messages += 1
        if self._messages >= TURN_MESSAGES:
            await self.give_way()

    async def _wait_taken(self, other: MemoryBackend, arrival: Arrival) -> None:
        taken = asyncio.get_running_loop().create_future()
        arrival.on_taken = lambda: _complete(taken)
        try:
            await self._wait(taken)
        except asyncio.CancelledError:
            if arrival.receive is None and arrival.handler is None:
                other.channel(self._name).mailbox.revoke(arrival)
            raise

    async def _wait(self, future: asyncio.Future[None]) -> None:
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    async def give_way(self) -> None:
        self._messages = 0
        await asyncio.sleep(0)

    def poll(self) -> None:
        """Do nothing: messages are delivered at once."""

    def held(self, tag: int) -> None:
        """Return None: messages are delivered at once."""

    def take(self, memory: memoryview) -> None:
        """Do nothing; never called, because ``held`` returns None."""

    async def paused(self, call: Callable[[], object]) -> None:
        await in_thread(call)

    def fail_sends(self, make_error: ErrorMaker) -> None:
        self._refusal = make_error
        for future in self._waiting:
            if not future.done():
                future.set_exception(make_error())

    def begin_close(self, make_error: ErrorMaker) -> None:
        self._refusal = self._refusal or make_error

    async def wait_drained(self) -> None:
        """Return at once."""

    def finish_close(self, linger_s: float) -> bool:
        return False

    def take_in(self) -> None:
        """Do nothing: messages are delivered at once."""

    def abort(self, make_error: ErrorMaker) -> None:
        self.fail_sends(make_error)

    def close_nowait(self) -> None:
        """Do nothing: there is no connection."""

    async def wait_closed(self) -> None:
        """Return at once."""


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class MemoryBackend(MessageBackend):
    @property
    def rank(self) -> int:
        return self._view.rank

    @property
    def eager_bytes(self) -> int:
        return self._view.config.eager_bytes

    def channel(self, name: str) -> Channel:
        return self._p2p if name == P2P else self._collective

    def peer(self, rank: int) -> MemoryBackend | None:
        """Return another member's backend, or None if it is gone or not open yet."""
        backend = _backends.get((self._view.incarnation.nonce, rank))
        return None if backend is None or backend._is_over else backend

    def fin(self, rank: int, name: str) -> None:
        """Handle the fin of a member on channel ``name``, after all its messages."""
        channel = self.channel(name)
        channel.mailbox.end(rank, self._view.left_error)
        lane = channel.lanes.get(rank)
        if isinstance(lane, MemoryLane):
            lane.is_finished = True
            lane.fail_sends(lambda: self._view.left_error(rank))

    def begin_close(self) -> None:
        super().begin_close()
        for rank in self._others:
            other = self.peer(rank)
            if other is not None:
                other.fin(self.rank, P2P)
                other.fin(self.rank, COLLECTIVE)

    def _has_lane(self, rank: int) -> bool:
        return True  # a lane exists without being opened

    async def open(self) -> None:
        _backends[self._view.incarnation.nonce, self._view.rank] = self
        await super().open()

    async def _open_lane(self, rank: int, name: str, channel: Channel) -> AnyLane:
        return MemoryLane(self, rank, name)
