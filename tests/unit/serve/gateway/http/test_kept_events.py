"""Streams that are kept: readers that come, leave and are slow, and too little room."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from multiworld.errors import UnknownStreamError
from multiworld.serve.gateway.http import kept_events
from multiworld.serve.gateway.http.kept_events import EventLog, EventLogs

HANG_S = 20.0
EVENT = b"data: x\n\n"
SIZE = len(b"id: 1\n" + EVENT)


class Source:
    """Gives an event for each call of ``give``."""

    def __init__(self) -> None:
        self.given: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_closed = False

    async def events(self) -> AsyncGenerator[bytes]:
        try:
            while (event := await self.given.get()) is not None:
                yield event
        finally:
            self.is_closed = True

    def give(self, count: int) -> None:
        for _ in range(count):
            self.given.put_nowait(EVENT)

    def end(self) -> None:
        self.given.put_nowait(None)


def begun(
    logs: EventLogs, name: str = "s", keep_s: float = 60.0, tenant: str = "t"
) -> tuple[EventLog, Source]:
    source = Source()
    log = logs.begin(name, tenant, keep_s)
    log.fill(source.events(), lambda: None)
    return log, source


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def all_of(log: EventLog, after: int = 0) -> list[int]:
    async with asyncio.timeout(HANG_S):
        return [number_of(event) async for event in log.read(after)]


def number_of(event: bytes) -> int:
    return int(event.partition(b"\n")[0].removeprefix(b"id: "))


async def test_stream_is_read_again_from_any_event() -> None:
    logs = EventLogs(1000)
    log, source = begun(logs)
    source.give(3)
    source.end()
    for after in range(4):
        assert await all_of(log, after) == list(range(after + 1, 4))


async def test_reader_waits_for_what_comes() -> None:
    log, source = begun(EventLogs(1000))
    source.give(1)
    reading = asyncio.ensure_future(all_of(log))
    await settle()
    source.give(2)
    source.end()
    assert await reading == [1, 2, 3]


async def test_comments_are_of_the_connection_not_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_events, "KEEP_ALIVE_S", 0.01)
    log, source = begun(EventLogs(1000))
    source.given.put_nowait(b": nothing\n\n")
    async with aclosing(log.read(0)) as events, asyncio.timeout(HANG_S):
        assert await anext(events) == kept_events.KEEP_ALIVE
        source.give(1)
        while (event := await anext(events)) == kept_events.KEEP_ALIVE:
            pass
    assert number_of(event) == 1


async def test_stream_without_a_reader_ends_after_a_while() -> None:
    logs = EventLogs(1000)
    log, source = begun(logs, keep_s=0.01)
    async with asyncio.timeout(HANG_S):
        while logs.find("s", "t"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        while not source.is_closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert log.is_complete


async def test_stream_with_a_reader_stays() -> None:
    logs = EventLogs(1000)
    log, source = begun(logs, keep_s=0.01)
    source.give(1)
    async with aclosing(log.read(0)) as events:
        await anext(events)
        await asyncio.sleep(0.05)
        assert logs.find("s", "t") is log


async def test_other_tenant_finds_nothing() -> None:
    logs = EventLogs(1000)
    begun(logs)
    assert logs.find("s", "u") is None


async def test_complete_streams_make_room_the_oldest_first() -> None:
    logs = EventLogs(2 * 4 * SIZE)
    for name in ("a", "b"):
        _, source = begun(logs, name)
        source.give(2)
        source.end()
        await settle()
    _, source = begun(logs, "c")
    source.give(1)
    await settle()
    assert [logs.find(name, "t") is not None for name in "abc"] == [False, True, True]


async def test_stream_without_room_and_reader_ends() -> None:
    logs = EventLogs(4 * SIZE)
    _, source = begun(logs)
    source.give(3)  # a tenant may have half
    await settle()
    assert source.is_closed
    assert logs.find("s", "t") is None


async def test_reader_of_a_stream_that_is_removed_for_want_of_room_is_told() -> None:
    log, source = begun(EventLogs(4 * SIZE))
    events = log.read(0)
    source.give(1)
    async with asyncio.timeout(HANG_S):
        await anext(events)
    late = log.read(0)
    await events.aclose()
    source.give(3)
    await settle()
    assert source.is_closed
    with pytest.raises(UnknownStreamError, match="for lack of memory"):
        [event async for event in late]


@pytest.mark.parametrize("comes", [True, False])
async def test_stream_that_moved_here_waits_for_its_readers(
    comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its events so far are made again at once, before any reader can come."""
    monkeypatch.setattr(kept_events, "READER_S", HANG_S if comes else 0.05)
    logs, source = EventLogs(4 * SIZE), Source()
    log = logs.begin("s", "t", 60.0)
    log.fill(source.events(), lambda: None, is_resumed=True)
    source.give(9)
    source.end()
    await settle()
    assert not source.is_closed
    if comes:
        assert await all_of(log) == list(range(1, 10))
    else:
        async with asyncio.timeout(HANG_S):
            while not source.is_closed:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert (logs.find("s", "t") is not None) is comes


async def test_request_of_a_stream_counts_as_long_as_its_log_is_kept() -> None:
    logs = EventLogs(8 * SIZE)
    for name in "abc":
        log, source = begun(logs, name)
        log.hold(3 * SIZE)
        source.give(1)
        source.end()
        await settle()
    assert [logs.find(name, "t") is not None for name in "abc"] == [False, False, True]
    log.end()
    assert logs.size == 0


async def test_stream_without_room_goes_at_the_pace_of_its_reader() -> None:
    logs = EventLogs(4 * SIZE)
    log, source = begun(logs)
    source.give(9)
    source.end()
    async with aclosing(log.read(0)) as events, asyncio.timeout(HANG_S):
        first = await anext(events)
        await settle()
        assert source.given.qsize() >= 6, "it waits for the reader"
        rest = [event async for event in events]
    assert [number_of(event) for event in (first, *rest)] == list(range(1, 10))
    log.require_all(9)
    with pytest.raises(UnknownStreamError, match="event 1 is no longer kept"):
        log.require_all(0)


async def test_stream_goes_on_when_its_slowest_reader_has_left() -> None:
    log, source = begun(EventLogs(4 * SIZE))
    source.give(1)
    slow = log.read(0)
    async with asyncio.timeout(HANG_S):
        await anext(slow)
    fast = asyncio.ensure_future(all_of(log))
    await settle()
    source.give(8)
    source.end()
    await settle()
    assert source.given.qsize() >= 5, "it waits for the slow reader"
    await slow.aclose()
    assert await fast == list(range(1, 10))


async def test_reader_that_begins_too_late_is_refused() -> None:
    """Between the check of its request and its first event, events may be dropped."""
    log, source = begun(EventLogs(4 * SIZE))
    async with aclosing(log.read(0)) as events, asyncio.timeout(HANG_S):
        source.give(1)
        await anext(events)
        late = log.read(0)
        source.give(5)
        for _ in range(4):
            await anext(events)
        with pytest.raises(UnknownStreamError):
            await anext(late)


async def test_size_is_zero_when_all_are_gone() -> None:
    logs = EventLogs(4 * SIZE)
    for name in "abc":
        log, source = begun(logs, name)
        source.give(2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await all_of(log)
        log.end()
    assert logs.size == 0
