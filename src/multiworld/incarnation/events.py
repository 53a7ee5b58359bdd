"""Events of a manager's worlds, and the hub that distributes them. Shell.

The events are frozen values, named in the past tense. The hub keeps a bounded queue for
each subscriber. A subscriber that does not read loses the oldest events, learns how
many it lost, and never slows a world down.
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
"""Events in a subscriber's queue, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of the events of one incarnation of a world.

    Attributes:
        world: The world's name.
        epoch: The incarnation's epoch.
    """

    world: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReady(Event):
    """Every member has joined, and traffic may flow."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft(Event):
    """A member left politely, after everything it had sent."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost(Event):
    """A member was declared lost; ``WorldBroken`` follows.

    Attributes:
        rank: The member's rank.
        reason: What happened, in words.
        evidence: The observation that led to the verdict.
        silent_s: Seconds since the member's last sign of life.
    """

    rank: int
    reason: str
    evidence: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStalled(Event):
    """A member's process runs, but its event loop gives no sign; the world lives on.

    Attributes:
        rank: The member's rank.
        stalled_s: Seconds since its event loop last gave a sign.
        evidence: What the thread of that loop seems to be doing.
    """

    rank: int
    stalled_s: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberResumed(Event):
    """The event loop of a stalled member runs again."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWaiting(Event):
    """A process claims a rank in the next incarnation of a living world.

    ``World.grow`` lets it in (``reform``, if the world is broken).

    Attributes:
        rank: The rank it claims.
        size: The world size it expects.
        is_gone: True if it has stopped waiting.
    """

    rank: int
    size: int
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldBroken(Event):
    """The world is unusable; every pending operation on it has failed.

    Attributes:
        reason: What happened, in words.
        evidence: The observation that led to the verdict.
        lost: Ranks known to be lost.
    """

    reason: str
    evidence: str
    lost: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldClosed(Event):
    """This process has left the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped(Event):
    """This subscriber read too slowly and lost its oldest events.

    Attributes:
        count: Number of events lost.
    """

    count: int


class Subscription:
    """One reader's queue of events."""

    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._queue: deque[Event] = deque()
        self._dropped = 0
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Append an event; drop the oldest one if the queue is full.

        Args:
            event: The event to append.
        """
        if len(self._queue) >= QUEUE_LIMIT:
            self._queue.popleft()
            self._dropped += 1
        self._queue.append(event)
        self.wake()

    def wake(self) -> None:
        """Wake the reader, so that it checks the queue and the hub again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def get_nowait(self) -> Event | None:
        """Return the next event, or None if there is none.

        Returns ``EventsDropped`` first if events were lost.
        """
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return EventsDropped(world="", epoch=0, count=dropped)
        return self._queue.popleft() if self._queue else None

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the hub closes.

        Cancellation:
            Ends the subscription; events that were not read are lost.
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
    """Distributor of every published event to every subscriber."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self.is_closed = False

    def subscribe(self) -> Subscription:
        """Return a new subscription to the events published from now on."""
        subscription = Subscription(self)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Remove a subscription; safe to repeat.

        Args:
            subscription: The subscription to remove.
        """
        self._subscriptions.discard(subscription)

    def publish(self, event: Event) -> None:
        """Append an event to the queue of every subscription.

        Args:
            event: The event to append.
        """
        for subscription in self._subscriptions:
            subscription.put(event)

    def close(self) -> None:
        """End every subscriber's iteration once it has read its queue."""
        self.is_closed = True
        for subscription in self._subscriptions:
            subscription.wake()
