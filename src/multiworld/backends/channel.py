"""A channel: one mailbox, and a lane to each other member. Messages and collectives
have a channel each, so a message that nobody receives cannot block a collective."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from multiworld.backends.arrivals import (
    Arrival,
    Check,
    Description,
    Merge,
    Place,
    Receive,
)
from multiworld.backends.base import ErrorMaker
from multiworld.backends.mailbox import Mailbox
from multiworld.backends.offload import OFFLOAD_BYTES
from multiworld.backends.spin import Spin

# Maximum messages that receives may take, or a lane may send, before the loop's other
# tasks run.
TURN_MESSAGES = 64


class Lane(Protocol):
    """A channel's view of the connection to one member; see ``direct.lane``."""

    rank: int

    @property
    def is_finished(self) -> bool:
        """True once the member's fin has arrived, after all its messages."""

    async def send(
        self, description: Description, memory: memoryview, owner: object
    ) -> None:
        """Send a message; return when ``memory``, which ``owner`` keeps alive, is
        reusable. Cancelling withdraws the rest; the lane stays usable."""

    async def give_way(self) -> None:
        """Let the loop's other tasks run."""

    def poll(self) -> None:
        """Read the bytes that have arrived already."""

    @property
    def is_held(self) -> bool:
        """True while a message is held that no receive has asked for."""

    def held(self, tag: int) -> Description | None:
        """Describe the held message if it has this tag and has arrived completely."""

    def take(self, memory: memoryview) -> None:
        """Copy the message that ``held`` described into ``memory``."""

    @property
    def is_dead(self) -> bool:
        """True once nothing more can arrive."""

    @property
    def is_arriving(self) -> bool:
        """True if data that the member sent may still be in the network."""

    def fail_sends(self, make_error: ErrorMaker) -> None:
        """Fail every send with ``make_error()``, now and later."""

    async def paused(self, call: Callable[[], object]) -> None:
        """Run ``call`` in a thread, reading nothing; a cancellation waits for it."""

    def begin_close(self, make_error: ErrorMaker) -> None:
        """Queue the fin; later sends raise ``make_error()``."""

    async def wait_drained(self) -> None:
        """Wait until everything queued, including the fin, has been written."""

    def finish_close(self, linger_s: float) -> bool:
        """Close; return True if the connection closes later, within ``linger_s``."""

    def take_in(self) -> None:
        """Read what has arrived, before ``abort``."""

    def abort(self, make_error: ErrorMaker) -> None:
        """Fail every send with ``make_error()`` and close the connection."""

    def close_nowait(self) -> None:
        """Close the connection at once."""

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""

    def fileno(self) -> int:
        """Return the descriptor; -1 if there is none or it is closed."""


@functools.cache
def _watch_forks() -> None:
    """Reset ``parked`` in a fork, where the parent's event loop does not run."""

    def forget() -> None:
        Channel.parked = 0

    os.register_at_fork(after_in_child=forget)


class Channel:
    """Mailbox and lanes for one purpose: messages or collectives of one world."""

    parked = 0  # number of this process's receives that are parked now

    def __init__(self, sources: Iterable[int], budget_bytes: int) -> None:
        # ``budget_bytes``: maximum size of unexpected messages held for each source.
        self.mailbox = Mailbox(frozenset(sources), budget_bytes)
        self.lanes: dict[int, Lane] = {}
        _watch_forks()
        self._spin = Spin()
        self._received = 0
        self._has_spun = False  # ``next_from`` has already spun for this receive

    def post(
        self,
        source: int | None,
        tag: int,
        check: Check,
        place: Place,
        merge: Merge | None = None,
    ) -> Receive:
        """Post a receive; the caller must ``wait`` for it or ``mailbox.cancel`` it."""
        future = asyncio.get_running_loop().create_future()
        receive = Receive(source, tag, check, place, future, merge)
        self.mailbox.post(receive)
        return receive

    async def wait(self, receive: Receive, *, settles: bool = True) -> Arrival:
        """Wait for the message of a posted receive; cancelling loses no message."""
        future = receive.future
        try:
            if not future.done():
                self._poll(receive.source)
            if not future.done() and not self._poll_for(receive):
                await self._park(future)
            else:
                self._received += 1
                if self._received >= TURN_MESSAGES:
                    await self._yield_to_loop()
            future.result()
            while (earlier := self.mailbox.earlier(receive)) is not None:
                await self._settled(earlier)
        except asyncio.CancelledError:
            try:
                await self._own_large(receive.arrival)
            finally:  # runs even if the task is cancelled a second time
                self.mailbox.cancel(receive)
            raise
        arrival = receive.arrival
        if arrival is None:
            # The receive failed: an earlier message was put back, and does not fit.
            assert receive.error is not None
            raise receive.error
        # The message stays unsettled with ``settles=False``: the caller must call
        # ``mailbox.settle`` or ``mailbox.cancel`` once it has used the message, because
        # later receives wait for that.
        if settles:
            self.mailbox.settle(receive)
        return arrival

    async def _settled(self, receive: Receive) -> None:
        """Wait until a receive has returned its message, or is cancelled."""
        if receive.settled is None:
            receive.settled = asyncio.get_running_loop().create_future()
        await asyncio.shield(receive.settled)

    async def _own_large(self, arrival: Arrival | None) -> None:
        """Move a large message out of the caller's tensor without blocking the loop."""
        if (
            arrival is None
            # Later receives wait for a complete message; ``cancel`` moves it at once.
            or arrival.is_complete
            or not arrival.is_borrowed
            or arrival.source not in self.lanes
        ):
            return
        if arrival.received > OFFLOAD_BYTES:
            await self.lanes[arrival.source].paused(arrival.own)

    def next_from(self, source: int, tag: int) -> Description | None:
        """Describe the message that a receive would get, if all of it has arrived."""
        # To receive it, the caller calls ``lanes[source].take``, with no ``await`` in
        # between.
        lane = self.lanes.get(source)
        if self._received >= TURN_MESSAGES:
            # The caller then posts a receive, which lets the loop's other tasks run but
            # keeps its position among the receives.
            return None
        if lane is None or not self.mailbox.is_clear(source, tag):
            return None
        self._received += 1
        found = lane.held(tag)
        if found is None and not lane.is_held:
            lane.poll()
            found = lane.held(tag)
            if found is None and not lane.is_held:
                self._has_spun = self._polls_in_vain(lambda: lane.is_held, lane.poll)
                found = lane.held(tag)
        # The poll may have completed a message for an earlier receive; if that is
        # cancelled now, its message comes before this one.
        return found if self.mailbox.is_clear(source, tag) else None

    def _polls_in_vain(
        self, is_there: Callable[[], bool], poll: Callable[[], None]
    ) -> bool:
        """Poll for a message as long as that pays off; return True if none came."""
        seconds = 0.0 if Channel.parked else self._spin.seconds
        if not seconds:
            return False
        began_at = now = time.perf_counter()
        while now - began_at < seconds:
            poll()
            now = time.perf_counter()
            if is_there():
                self._spin.hit(now - began_at)
                return False
        self._spin.missed()
        return True

    async def _yield_to_loop(self) -> None:
        """Let other tasks run; otherwise, arriving messages could starve them."""
        self._received = 0
        await asyncio.sleep(0)

    def _poll(self, source: int | None) -> None:
        if source is None:
            for lane in self.lanes.values():
                lane.poll()
        elif source in self.lanes:
            self.lanes[source].poll()

    def _poll_for(self, receive: Receive) -> bool:
        has_spun, self._has_spun = self._has_spun, False
        if not has_spun:
            self._polls_in_vain(receive.future.done, lambda: self._poll(receive.source))
        return receive.future.done()

    async def _park(self, future: asyncio.Future[Arrival]) -> None:
        Channel.parked += 1
        began = time.perf_counter()
        try:
            await future
        finally:
            # Not below 0: a fork may have reset it during the wait.
            Channel.parked = max(0, Channel.parked - 1)
            self._spin.parked(time.perf_counter() - began)
            self._received = 0

    # Closing.

    def member_left(self, rank: int, make_error: ErrorMaker) -> None:
        """Fail every send to a member that left; its messages can be received."""
        lane = self.lanes.get(rank)
        if lane is not None:
            lane.fail_sends(make_error)
        if lane is None or (lane.is_dead and not lane.is_finished):
            self.mailbox.end(rank, lambda _: make_error())

    def end(self, make_error: ErrorMaker) -> None:
        """Fail every operation, now and later, but stay connected."""
        self.mailbox.abort(make_error)
        for lane in self.lanes.values():
            lane.fail_sends(make_error)

    def abort(self, make_error: ErrorMaker) -> None:
        """Fail every operation, close every lane; arrived messages can be received."""
        for lane in self.lanes.values():
            lane.take_in()
        self.mailbox.abort(make_error)
        for lane in self.lanes.values():
            lane.abort(make_error)
