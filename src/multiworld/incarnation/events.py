"""What a manager reports of its worlds, and the hub that hands it out.

The events are frozen values in the past tense. The hub keeps a bounded queue for each
subscriber: a subscriber that does not read loses the oldest events (and is told how
many), and never slows a world down.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

__all__ = [
    "Event",
    "EventsDropped",
    "MemberLeft",
    "MemberLost",
    "MemberResumed",
    "MemberStalled",
    "MemberWaiting",
    "WorldBroken",
    "WorldClosed",
    "WorldReady",
]

QUEUE_LIMIT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to one incarnation of a world."""

    world: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReady(Event):
    """Every member has joined; traffic may flow."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft(Event):
    """A member left politely, behind all that it had sent."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost(Event):
    """A member was declared lost; ``WorldBroken`` follows."""

    rank: int
    reason: str
    evidence: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStalled(Event):
    """A member's process runs, but its event loop gives no sign; the world lives on.

    Attributes:
        rank: The member.
        stalled_s: For how long.
        evidence: What its loop's thread seems to do.
    """

    rank: int
    stalled_s: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberResumed(Event):
    """The event loop of a stalled member turns again."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWaiting(Event):
    """A process claims a rank of the next incarnation of a world that lives.

    ``World.grow`` (or ``reform``, if the world is broken) lets it in.

    Attributes:
        rank: The rank it claims.
        size: The world size it expects.
        is_gone: True if it has given up waiting.
    """

    rank: int
    size: int
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldBroken(Event):
    """The world is unusable; every pending operation of it has failed."""

    reason: str
    evidence: str
    lost: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldClosed(Event):
    """This process has left the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped(Event):
    """This subscriber read too slowly: so many of the oldest events are gone."""

    count: int


class Subscription:
    """One reader's queue of events."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._queue: deque[Event] = deque()
        self._dropped = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Append ``event``; drop the oldest one if the queue is full."""
        if len(self._queue) >= QUEUE_LIMIT:
            self._queue.popleft()
            self._dropped += 1
        self._queue.append(event)
        self.wake()

    def wake(self) -> None:
        """Let the reader look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def get_nowait(self) -> Event | None:
        """Return the next event, or None."""
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return EventsDropped(world="", epoch=0, count=dropped)
        return self._queue.popleft() if self._queue else None

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the hub closes.

        Cancellation: safe; no event is lost but those not yet read.
        """
        try:
            while True:
                event = self.get_nowait()
                if event is not None:
                    yield event
                elif self._hub.is_closed:
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self._hub.unsubscribe(self)


class EventHub:
    """Hands every published event to every subscriber."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self.is_closed = False

    def subscribe(self) -> Subscription:
        """Start a queue; it holds events published from now on."""
        subscription = Subscription(self)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a queue."""
        self._subscriptions.discard(subscription)

    def publish(self, event: Event) -> None:
        """Append ``event`` to every queue."""
        for subscription in self._subscriptions:
            subscription.put(event)

    def close(self) -> None:
        """End every subscriber's iteration once it has read what is queued."""
        self.is_closed = True
        for subscription in self._subscriptions:
            subscription.wake()
