"""Event logs of streams, from which clients resume after a lost connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from multiworld.errors import UnknownStreamError

COMMENT = b":"  # first byte of a comment, which keeps a connection open
KEEP_ALIVE = b": still generating\n\n"
# Maximum seconds until a reader's connection moves here from the previous gateway.
READER_S = 10.0
KEEP_ALIVE_S = 10.0  # seconds without an event after which a reader gets a comment


class EventLog:
    """The events of one stream, for any number of readers.

    The log is filled whether or not it has readers. ``keep_s`` after its last reader
    has left, the log is removed; if the stream is not complete, it is cancelled.
    """

    def __init__(
        self,
        logs: EventLogs,
        name: str,
        tenant: str,
        keep_s: float,
        end: _Call,
        on_read: Callable[[int], object],
    ) -> None:
        self._logs, self.name, self.tenant = logs, name, tenant  # the stream's owner
        self._keep_s, self._end = keep_s, end
        self.on_read = on_read  # called with the number of bytes that a reader is sent
        self._events: list[bytes] = []
        self._first = 0  # number of events that were dropped for lack of memory
        self._is_waiting = False
        self.size = 0  # bytes of all events, and of the record of the request
        self._is_cut = False  # it was removed for lack of memory
        # True: readers' connections may still move here from the previous gateway.
        self._may_be_awaited = False
        self.is_complete = False  # the stream has ended
        # For each reader, a list with the number of the last event that it has.
        self._positions: list[list[int]] = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._filling: asyncio.Task[None] | None = None

    @property
    def has_readers(self) -> bool:
        return bool(self._positions)

    def require_all(self, after: int) -> None:
        """Raise UnknownStreamError if an event after number ``after`` was dropped."""
        if after < self._first:
            raise UnknownStreamError(
                f"event {after + 1} is no longer kept; the operator can raise "
                "gateway.detached_mb"
            )

    # Filling.

    def hold(self, size: int) -> None:
        """Count ``size`` bytes that are held until the log is removed."""
        self._logs.count(self, size)

    def fill(
        self,
        events: AsyncGenerator[bytes],
        on_filled: Callable[[], object],
        *,
        is_resumed: bool = False,  # whether another gateway had the stream before
    ) -> None:
        """Log ``events`` in a task; call ``on_filled`` when they have ended."""
        self._may_be_awaited = is_resumed
        self._filling = asyncio.ensure_future(self._fill(events))
        self._filling.add_done_callback(lambda _: on_filled())
        self._wait_for_reader()

    async def _fill(self, events: AsyncGenerator[bytes]) -> None:
        try:
            async with aclosing(events):
                async for event in events:
                    if not event.startswith(COMMENT):
                        await self._add(event)
        finally:
            self.is_complete = True
            self._tell()

    async def _add(self, event: bytes) -> None:
        number = self._first + len(self._events) + 1
        event = b"id: %d\n%b" % (number, event)
        self._events.append(event)
        self._tell()
        self._logs.count(self, len(event))
        while self._logs.is_full(self):
            if not self._positions and not await self._reader_comes():
                self._is_cut = True
                self.end()
                return
            self._drop(min(at for (at,) in self._positions))
            if not self._events:
                return
            self._is_waiting = True  # waits for the slowest reader
            await self._changed.wait()
            self._is_waiting = False

    async def _reader_comes(self) -> bool:
        """Return whether there is a reader; first wait if one may still move here."""
        if self._may_be_awaited:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READER_S):
                    while not self._positions:
                        await self._changed.wait()
            self._may_be_awaited = False
        return bool(self._positions)

    def _drop(self, number: int) -> None:
        """Drop the events up to and including ``number``."""
        done = self._events[: number - self._first]
        del self._events[: len(done)]
        self._first += len(done)
        self._logs.count(self, -sum(map(len, done)))

    def _tell(self) -> None:
        """Wake all tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # Reading.

    async def read(self, after: int) -> AsyncGenerator[bytes]:
        """Yield the events after ``after``; UnknownStreamError if some were dropped."""
        self.require_all(after)
        position = [after]
        self._positions.append(position)
        self._tell()  # the stream may wait for a reader
        self._stop_timer()
        try:
            while True:
                while 0 <= position[0] - self._first < len(self._events):
                    event = self._events[position[0] - self._first]
                    position[0] += 1
                    if self._is_waiting:
                        self._tell()
                    yield event
                if self._is_cut:
                    raise UnknownStreamError(
                        "the stream was removed for lack of memory; the operator can "
                        "raise gateway.detached_mb"
                    )
                if self.is_complete:
                    return
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        await self._changed.wait()
                except TimeoutError:
                    yield KEEP_ALIVE
        finally:
            self._positions.remove(position)
            self._tell()  # the stream may wait for this reader
            self._wait_for_reader()

    # The end.

    def _wait_for_reader(self) -> None:
        self._stop_timer()
        if not self._positions:
            self._timer = self._loop.call_later(self._keep_s, self.end)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """Remove the log; cancel its stream if the stream is not complete."""
        self._stop_timer()
        if self._logs.remove(self):
            self._end()
        if self._filling is not None:
            self._filling.cancel()


_Call = Callable[[], None]


class EventLogs:
    """The logs of a gateway: ``max_bytes`` of events, at most half for one tenant."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._logs: dict[str, EventLog] = {}  # oldest first
        self._sizes = Counter[str]()  # bytes of the events, by tenant
        self._begun = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes of all events."""
        return self._sizes.total()

    def begin(
        self,
        name: str,
        tenant: str,
        keep_s: float,
        on_end: _Call = lambda: None,
        *,
        on_read: Callable[[int], object] = lambda size: None,
    ) -> EventLog:
        """Return a new log, for the caller to fill; removing it calls ``on_end``."""
        log = EventLog(self, name, tenant, keep_s, on_end, on_read)
        self._logs[name] = log
        self._begun.set()
        self._begun = asyncio.Event()
        return log

    async def expect(self, name: str, tenant: str, limit_s: float) -> EventLog | None:
        """Wait until a tenant's log begins; return None after ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while name not in self._logs:
                    await self._begun.wait()
        return self.find(name, tenant)

    def find(self, name: str, tenant: str) -> EventLog | None:
        """Return a tenant's log by name; None if there is none."""
        log = self._logs.get(name)
        return log if log is not None and log.tenant == tenant else None

    def count(self, log: EventLog, size: int) -> None:
        if self._logs.get(log.name) is log:
            log.size += size
            self._sizes[log.tenant] += size

    def is_full(self, log: EventLog) -> bool:
        """Evict complete, unread logs; return whether a limit is still exceeded."""
        for other in list(self._logs.values()):
            has_too_much = self._has_too_much(log.tenant)
            if not has_too_much and self.size <= self._max_bytes:
                return False
            is_idle = other.is_complete and not other.has_readers
            if is_idle and (not has_too_much or other.tenant == log.tenant):
                other.end()
        return self._has_too_much(log.tenant) or self.size > self._max_bytes

    def _has_too_much(self, tenant: str) -> bool:
        return self._sizes[tenant] > self._max_bytes // 2

    def remove(self, log: EventLog) -> bool:
        """Remove a log; return whether it was present."""
        if self._logs.get(log.name) is not log:
            return False
        del self._logs[log.name]
        self._sizes[log.tenant] -= log.size
        if not self._sizes[log.tenant]:
            del self._sizes[log.tenant]
        return True
