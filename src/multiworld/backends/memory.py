"""The ``memory`` backend: several ranks inside one process, for tests and docs.

Messages are handed from mailbox to mailbox on the same event loop. With
``WorldConfig(eager_bytes=0)`` every send waits until its message is received (the
rendezvous mode): a program that passes its tests in that mode does not depend on
buffering.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import torch

from multiworld.backends.base import ErrorMaker
from multiworld.backends.channel import Channel
from multiworld.backends.channel import Lane as AnyLane
from multiworld.backends.direct.header import TENSOR
from multiworld.backends.dtypes import DTYPES, memory_of
from multiworld.backends.mailbox import Arrival, Description
from multiworld.backends.messages import COLLECTIVE, P2P, MessageBackend
from multiworld.backends.offload import in_thread

_Key = tuple[int, int]  # nonce, rank
_backends: weakref.WeakValueDictionary[_Key, MemoryBackend] = (
    weakref.WeakValueDictionary()
)

TURN_MESSAGES = 64


class MemoryLane:
    """One member's way to another's mailbox."""

    def __init__(self, owner: MemoryBackend, peer: int, name: str) -> None:
        self.rank = peer
        self._owner, self._name = owner, name
        self._refusal: ErrorMaker | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._messages = 0
        self.is_finished = False

    def fileno(self) -> int:
        """Return -1: there is no descriptor."""
        return -1

    async def send(
        self, description: Description, memory: memoryview, owner: object
    ) -> None:
        """Hand a copy over; above ``eager_bytes``, wait until it is received.

        Cancellation: a message that was not received yet is withdrawn.
        """
        if self._refusal is not None:
            raise self._refusal()
        other = self._owner.peer(self.rank)
        if other is None:
            await self._wait(asyncio.get_running_loop().create_future())
            return
        copy = torch.empty(description.size, dtype=torch.uint8)
        memory_of(copy)[:] = memory
        if description.kind == TENSOR:
            copy = copy.view(DTYPES[description.dtype]).view(description.shape)
        mailbox = other.channel(self._name).mailbox
        arrival = mailbox.deliver(self._owner.rank, description, copy)
        if description.size > self._owner.eager_bytes and arrival.receive is None:
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
            if arrival.receive is None:
                other.channel(self._name).mailbox.revoke(arrival)
            raise

    async def _wait(self, future: asyncio.Future[None]) -> None:
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    async def give_way(self) -> None:
        """Let the loop's other tasks run."""
        self._messages = 0
        await asyncio.sleep(0)

    def poll(self) -> None:
        """Nothing to do: messages are handed over at once."""

    @property
    def is_held(self) -> bool:
        """True: there is nothing to look for, and nothing to spin for."""
        return True

    def held(self, tag: int) -> None:
        """Return None: messages are handed over at once."""

    def take(self, memory: memoryview) -> None:
        """Not called: nothing is ever held."""

    @property
    def is_dead(self) -> bool:
        """False: there is no connection that could fail."""
        return False

    async def paused(self, call: Callable[[], object]) -> None:
        """Run ``call`` in a thread.

        Cancellation: waits for the thread.
        """
        await in_thread(call)

    def fail_sends(self, make_error: ErrorMaker) -> None:
        """Fail every send, now and from now on."""
        self._refusal = make_error
        for future in self._waiting:
            if not future.done():
                future.set_exception(make_error())

    def begin_close(self, make_error: ErrorMaker) -> None:
        """Refuse what comes from now on; the backend says fin."""
        self._refusal = self._refusal or make_error

    async def wait_drained(self) -> None:
        """Return at once."""

    def finish_close(self, linger_s: float) -> bool:
        """Return False: nothing lingers."""
        return False

    def abort(self, make_error: ErrorMaker) -> None:
        """Fail every send."""
        self.fail_sends(make_error)

    def close_nowait(self) -> None:
        """Nothing to do."""

    async def wait_closed(self) -> None:
        """Return at once."""


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class MemoryBackend(MessageBackend):
    """Moves tensors between ranks of one process."""

    @property
    def rank(self) -> int:
        """This member's rank."""
        return self._view.rank

    @property
    def eager_bytes(self) -> int:
        """Up to this size a send does not wait."""
        return self._view.config.eager_bytes

    def channel(self, name: str) -> Channel:
        """Return a channel by name."""
        return self._p2p if name == P2P else self._collective

    def peer(self, rank: int) -> MemoryBackend | None:
        """Return another member's backend, or None once it is gone."""
        backend = _backends.get((self._view.incarnation.nonce, rank))
        return None if backend is None or backend._is_over else backend

    def fin(self, rank: int, name: str) -> None:
        """Take a member's fin, behind all its messages."""
        channel = self.channel(name)
        channel.mailbox.end(rank, self._view.left_error)
        lane = channel.lanes.get(rank)
        if isinstance(lane, MemoryLane):
            lane.is_finished = True
            lane.fail_sends(lambda: self._view.left_error(rank))

    def begin_close(self) -> None:
        """Say fin to everybody, on both channels."""
        super().begin_close()
        for rank in self._others:
            other = self.peer(rank)
            if other is not None:
                other.fin(self.rank, P2P)
                other.fin(self.rank, COLLECTIVE)

    def _has_lane(self, rank: int) -> bool:
        return True  # there is nothing to open

    async def open(self) -> None:
        """Let the other ranks find this one."""
        _backends[self._view.incarnation.nonce, self._view.rank] = self
        await super().open()

    async def _open_lane(self, rank: int, name: str, channel: Channel) -> AnyLane:
        return MemoryLane(self, rank, name)
