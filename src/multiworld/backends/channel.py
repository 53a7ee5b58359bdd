"""A channel: one mailbox, and a lane to each other member. Shell.

Point-to-point messages and collectives each have a channel of their own, so that a
message nobody receives cannot stand in a collective's way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from multiworld.backends.base import ErrorMaker
from multiworld.backends.mailbox import (
    Arrival,
    Check,
    Description,
    Mailbox,
    Merge,
    Place,
    Receive,
)
from multiworld.backends.offload import OFFLOAD_BYTES

SPIN_S = 50e-6
"""Longest bounded spin before parking. Measured: the selector's wake-up costs as much
as four round trips of a Unix socket; spinning 200 µs starved the peer on two cores."""


TURN_MESSAGES = 64
"""What one who receives may take before the loop's other tasks have their turn."""

SHORT_WAIT_S = 10 * SPIN_S
"""Waits that were shorter than this are worth a spin: parking makes a wait of 30 µs one
of 200 µs."""


class Lane(Protocol):
    """What a channel needs of a connection; see ``direct.lane``."""

    rank: int

    @property
    def is_finished(self) -> bool:
        """True once the member's fin has arrived."""

    async def send(
        self, description: Description, memory: memoryview, owner: object
    ) -> None:
        """Send a message."""

    async def give_way(self) -> None:
        """Let the loop's other tasks run."""

    def poll(self) -> None:
        """Take what has arrived already."""

    @property
    def is_held(self) -> bool:
        """True while a message has begun to arrive that nobody has asked for."""

    def held(self, tag: int) -> Description | None:
        """Return what the next message is, if it has this tag and all of it is here."""

    def take(self, memory: memoryview) -> None:
        """Copy the message that ``held`` described, to its end."""

    @property
    def is_dead(self) -> bool:
        """True once nothing more can arrive."""

    def fail_sends(self, make_error: ErrorMaker) -> None:
        """Fail every send, now and from now on."""

    async def paused(self, call: Callable[[], object]) -> None:
        """Run ``call`` in a thread while nothing arrives."""

    def begin_close(self, make_error: ErrorMaker) -> None:
        """Queue the fin; refuse what comes after it."""

    async def wait_drained(self) -> None:
        """Wait until everything has left."""

    def finish_close(self, linger_s: float) -> bool:
        """Close, perhaps later."""

    def abort(self, make_error: ErrorMaker) -> None:
        """Fail every send and hang up."""

    def close_nowait(self) -> None:
        """Hang up."""

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""

    def fileno(self) -> int:
        """Return the descriptor, or -1."""


class _Parked:
    """Counts the operations of this process that wait in a loop right now."""

    count = 0


class Channel:
    """Sends and receives between the members of one world."""

    def __init__(self, sources: Iterable[int], budget_bytes: int) -> None:
        self.mailbox = Mailbox(frozenset(sources), budget_bytes)
        self.lanes: dict[int, Lane] = {}
        self._recent_wait_s = 1.0
        self._received = 0
        self._has_spun = False  # for the receive that is being made

    def post(
        self,
        source: int | None,
        tag: int,
        check: Check,
        place: Place,
        merge: Merge | None = None,
    ) -> Receive:
        """Post a receive; ``wait`` for it or ``mailbox.cancel`` it."""
        future = asyncio.get_running_loop().create_future()
        receive = Receive(source, tag, check, place, future, merge)
        self.mailbox.post(receive)
        return receive

    async def wait(self, receive: Receive) -> Arrival:
        """Return the message of a posted receive.

        Cancellation: no message is lost; see ``Mailbox``.
        """
        future = receive.future
        try:
            if not future.done():
                self._poll(receive.source)
            if future.done():
                self._received += 1
                if self._received >= TURN_MESSAGES:
                    await self._take_turn()
            elif not self._spin(receive):
                await self._park(future)
            arrival = future.result()
        except asyncio.CancelledError:
            try:
                await self._own_large(receive.arrival)
            finally:  # also if it is cancelled once more
                self.mailbox.cancel(receive)
            raise
        # No circle stays: the message's memory is free when its tensor is dropped.
        receive.arrival = arrival.receive = None
        return arrival

    async def _own_large(self, arrival: Arrival | None) -> None:
        """Move a large message out of the caller's tensor without holding up the loop.

        ``cancel`` does it as well, at once; that is for short ones.
        """
        if (
            arrival is None
            or not arrival.is_borrowed
            or arrival.source not in self.lanes
        ):
            return
        if arrival.received > OFFLOAD_BYTES:
            await self.lanes[arrival.source].paused(arrival.own)

    async def next_from(self, source: int, tag: int) -> Description | None:
        """Return what a receive would get, if it is here and nobody comes before it.

        ``lanes[source].take`` copies it; nothing may happen in between.

        Cancellation: safe.
        """
        if self._received >= TURN_MESSAGES:
            await self._take_turn()
        lane = self.lanes.get(source)
        if lane is None or not self.mailbox.is_clear(source, tag):
            return None
        self._received += 1
        found = lane.held(tag)
        if found is None and not lane.is_held:
            lane.poll()
            found = lane.held(tag)
            if found is None and not lane.is_held and self._may_spin:
                found = self._spin_for(lane, tag)
        return found

    def _spin_for(self, lane: Lane, tag: int) -> Description | None:
        end = time.perf_counter() + SPIN_S
        while not lane.is_held and time.perf_counter() < end:
            lane.poll()
        self._has_spun = not lane.is_held
        return lane.held(tag)

    @property
    def _may_spin(self) -> bool:
        """Whether recent waits were short, and nobody else waits."""
        return not _Parked.count and self._recent_wait_s <= SHORT_WAIT_S

    async def _take_turn(self) -> None:
        """Give way every so often, where messages are always there already."""
        self._received = 0
        await asyncio.sleep(0)

    def _poll(self, source: int | None) -> None:
        if source is None:
            for lane in self.lanes.values():
                lane.poll()
        elif source in self.lanes:
            self.lanes[source].poll()

    def _spin(self, receive: Receive) -> bool:
        """Poll for a moment if recent waits were short and nobody else waits."""
        if self._has_spun or not self._may_spin:
            self._has_spun = False
            return False
        end = time.perf_counter() + SPIN_S
        while time.perf_counter() < end:
            self._poll(receive.source)
            if receive.future.done():
                return True
        return False

    async def _park(self, future: asyncio.Future[Arrival]) -> None:
        _Parked.count += 1
        began = time.perf_counter()
        try:
            await future
        finally:
            _Parked.count -= 1
            self._recent_wait_s = time.perf_counter() - began
            self._received = 0

    # The end.

    def member_left(self, rank: int, make_error: ErrorMaker) -> None:
        """Fail every send to a member that left; receives go on to its fin."""
        lane = self.lanes.get(rank)
        if lane is not None:
            lane.fail_sends(make_error)
        if lane is None or (lane.is_dead and not lane.is_finished):
            self.mailbox.end(rank, lambda _: make_error())

    def end(self, make_error: ErrorMaker) -> None:
        """Fail everything, now and from now on, but stay connected."""
        self.mailbox.abort(make_error)
        for lane in self.lanes.values():
            lane.fail_sends(make_error)

    def abort(self, make_error: ErrorMaker) -> None:
        """Fail everything and hang up."""
        self.mailbox.abort(make_error)
        for lane in self.lanes.values():
            lane.abort(make_error)

    def close_nowait(self) -> None:
        """Hang up."""
        for lane in self.lanes.values():
            lane.close_nowait()

    def filenos(self) -> list[int]:
        """Return the open descriptors."""
        return [fd for lane in self.lanes.values() if (fd := lane.fileno()) >= 0]
