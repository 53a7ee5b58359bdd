"""The hub that distributes events to subscribers. A slow subscriber loses its
oldest events, and never slows a world down."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator

from multiworld.incarnation.events import Event, EventsDropped

QUEUE_LIMIT = 1024  # maximum number of events in one subscriber's queue


class Subscription:
    def __init__(self, hub: EventHub) -> None:
        self._hub = hub
        self._queue: deque[Event] = deque(maxlen=QUEUE_LIMIT)
        self._dropped = 0
        # Set when an event was added, or the hub was closed.
        self.changed = asyncio.Event()

    def put(self, event: Event) -> None:
        """Append an event; drop the oldest one if the queue is full."""
        if len(self._queue) == QUEUE_LIMIT:
            self._dropped += 1
        self._queue.append(event)
        self.changed.set()

    def get_nowait(self) -> Event | None:
        """Return the next event or None; first ``EventsDropped`` if some were lost."""
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            return EventsDropped(world="", epoch=0, count=dropped)
        return self._queue.popleft() if self._queue else None

    async def events(self) -> AsyncIterator[Event]:
        """Yield events until the hub closes; cancelling ends the subscription."""
        self._hub.read.add(self)
        try:
            while True:
                event = self.get_nowait()
                if event is not None:
                    yield event
                elif self._hub.is_closed:
                    return
                else:
                    self.changed.clear()
                    await self.changed.wait()
        finally:
            self._hub.read.discard(self)
            self._hub.subscriptions.discard(self)


class EventHub:
    def __init__(self) -> None:
        # Weak references: a subscription is removed if the program drops it without
        # having read from it.
        self.subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        # Strong references: a subscription that a task waits for must not be
        # garbage-collected.
        self.read: set[Subscription] = set()
        self.is_closed = False

    def subscribe(self) -> Subscription:
        """Return a new subscription to the events published from now on."""
        subscription = Subscription(self)
        self.subscriptions.add(subscription)
        return subscription

    def publish(self, event: Event) -> None:
        for subscription in self.subscriptions:
            subscription.put(event)

    def close(self) -> None:
        """End every subscriber's iteration once the subscriber has read its queue."""
        self.is_closed = True
        for subscription in self.subscriptions:
            subscription.changed.set()
