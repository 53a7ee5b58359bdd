"""Events for subscribers: order, slow readers, and the end."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from multiworld.incarnation.event_hub import QUEUE_LIMIT, EventHub, Subscription
from multiworld.incarnation.events import Event, EventsDropped, WorldClosed
from tests.unit.waiting import turns


def event(number: int) -> Event:
    return WorldClosed(world="w", epoch=number)


def epochs(subscription: Subscription) -> list[int]:
    """Take all pending events of a subscription; return their numbers."""
    found = []
    while (taken := subscription.get_nowait()) is not None:
        found.append(taken.epoch)
    return found


async def collect(subscription: Subscription) -> list[int]:
    return [taken.epoch async for taken in subscription.events()]


def test_every_subscriber_gets_every_event_from_now_on() -> None:
    hub = EventHub()
    early = hub.subscribe()
    hub.publish(event(1))
    late = hub.subscribe()
    hub.publish(event(2))
    assert (epochs(early), epochs(late)) == ([1, 2], [2])


async def test_iterator_that_nobody_reads_keeps_no_events() -> None:
    """It subscribes before its first step, and may be dropped before that."""
    hub = EventHub()
    unread = hub.subscribe()
    kept, dropped = hub.subscribe().events(), weakref.ref(unread)
    del unread
    hub.publish(event(1))
    gc.collect()
    assert dropped() is None
    hub.close()
    assert [taken.epoch async for taken in kept] == [1]


async def test_task_that_waits_for_events_and_that_nobody_keeps_gets_them() -> None:
    """Only the hub refers to what the task waits for."""
    hub, found = EventHub(), list[int]()

    async def watch() -> None:
        async for taken in hub.subscribe().events():
            found.append(taken.epoch)

    asyncio.get_running_loop().create_task(watch())
    for number in (1, 2):
        await turns(3)
        gc.collect()
        hub.publish(event(number))
    await turns(3)
    assert found == [1, 2]
    hub.close()
    await turns(3)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_slow_reader_loses_the_oldest_and_learns_how_many(extra: int) -> None:
    hub = EventHub()
    subscription = hub.subscribe()
    for number in range(QUEUE_LIMIT + extra):
        hub.publish(event(number))
    if extra:
        assert subscription.get_nowait() == EventsDropped(
            world="", epoch=0, count=extra
        )
    assert epochs(subscription) == list(range(extra, QUEUE_LIMIT + extra))
    hub.publish(event(7))
    assert epochs(subscription) == [7]


def test_slow_reader_does_not_cost_another_one_its_events() -> None:
    hub = EventHub()
    slow, quick = hub.subscribe(), hub.subscribe()
    found = []
    for number in range(QUEUE_LIMIT + 10):
        hub.publish(event(number))
        found += epochs(quick)
    assert found == list(range(QUEUE_LIMIT + 10))
    assert isinstance(slow.get_nowait(), EventsDropped)


async def test_reader_that_waits_is_woken() -> None:
    hub = EventHub()
    reading = asyncio.create_task(collect(hub.subscribe()))
    await turns(3)
    hub.publish(event(1))
    hub.publish(event(2))
    await turns(3)
    hub.publish(event(3))
    await turns(3)
    hub.close()
    assert await reading == [1, 2, 3]


async def test_iteration_ends_with_the_hub_and_not_before_the_last_event() -> None:
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(event(1))
    hub.close()
    hub.close()
    assert await collect(subscription) == [1]
    assert await collect(hub.subscribe()) == []


async def test_cancelled_reader_is_unsubscribed() -> None:
    """Otherwise the hub would keep events for it."""
    hub = EventHub()
    subscription = hub.subscribe()
    reading = asyncio.create_task(collect(subscription))
    await turns(3)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    hub.publish(event(1))
    assert subscription.get_nowait() is None


async def test_reader_that_leaves_its_loop_is_unsubscribed() -> None:
    """A closed iterator ends the subscription too."""
    hub = EventHub()
    subscription = hub.subscribe()
    hub.publish(event(1))
    hub.publish(event(2))
    events = subscription.events()
    assert (await anext(events)).epoch == 1
    await events.aclose()  # type: ignore[attr-defined]
    hub.publish(event(3))
    assert epochs(subscription) == [2]


async def test_publishing_in_a_reader_reaches_everybody() -> None:
    """A program may close a world while it handles an event."""
    hub = EventHub()
    other = hub.subscribe()

    async def react() -> None:
        async for taken in hub.subscribe().events():
            if taken.epoch == 1:
                hub.publish(event(2))
            else:
                hub.close()

    reacting = asyncio.create_task(react())
    await turns(3)
    hub.publish(event(1))
    await reacting
    assert await collect(other) == [1, 2]
