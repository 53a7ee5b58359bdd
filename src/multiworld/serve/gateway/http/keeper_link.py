"""A gateway's link to the stream keeper of its host.

While there is a keeper, a gateway sends output to a client only after the keeper has
recorded it. Without a keeper, streams continue unprotected; the next keeper gets all
records of this gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path

from multiworld.errors import KeeperLostError
from multiworld.serve.deadlines import KEEPER_S
from multiworld.serve.keeper.channel import Channel, add_socket
from multiworld.serve.keeper.connection_record import ConnectionRecord, record_of
from multiworld.serve.keeper.frames import (
    PROTOCOL,
    Entry,
    Kind,
    Place,
    entry,
    frame,
    frames,
)

logger = logging.getLogger("multiworld.serve")

BEATS = 8  # minimum number of heartbeats to the keeper within ``silence_s``
MAX_BEAT_S = 0.25  # maximum seconds between two heartbeats
# Maximum bytes of a connection's input that this gateway keeps, to send them to the
# next keeper if this one is lost.
MIRROR_BYTES = 1024 * 1024
# Maximum seconds to wait for the keeper's answer to a stream look-up.
FIND_S = 2.0
NO_ANSWER = "the stream keeper is being replaced; retry later"
AGAIN_S = 0.02  # seconds between attempts to reach a keeper

Write = tuple["Recorded", Callable[[], None]]
Serve = Callable[[socket.socket | None, ConnectionRecord], object]


class Recorded:
    """A connection that the link records; the defaults suit one without a client."""

    record: ConnectionRecord

    def fileno(self) -> int:
        """Return the descriptor of the socket; negative if there is none."""
        return -1

    def settle(self) -> None:
        """Bring the record up to date."""
        self.record.settle()

    def hold(self) -> None:
        """Pause output, because the keeper's socket is full."""

    def resume(self) -> None:
        """Resume output."""

    def pause_reading(self) -> None:
        """Pause reading from the client, because the keeper's socket is full."""

    def resume_reading(self) -> None:
        """Resume reading."""

    def fail(self) -> None:
        """Close the connection after a write has failed."""

    def abandon(self) -> None:
        """Release the socket without closing the connection."""


class KeeperLink:
    """Sends recorded entries, once per loop iteration, and receives connections.

    A keeper counts as hung after ``silence_s`` + ``KEEPER_S`` of silence. ``serve`` is
    called with each connection; one without a socket is a kept stream.
    """

    def __init__(self, path: Path, name: str, silence_s: float, serve: Serve) -> None:
        self._path, self._name = path, name
        self._silence_s, self._serve = silence_s, serve
        self._beat_s = min(MAX_BEAT_S, silence_s / BEATS)
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._lost = asyncio.Event()
        self._unanswered = 0  # heartbeats since the keeper's last message
        self._is_ready = self._is_leaving = False
        self._connections: dict[int, Recorded] = {}
        self._given: dict[int, list[Entry]] = {}
        self._arriving: set[int] = set()  # connections given, but not yet added
        self._listeners: list[socket.socket] = []
        # Entries of this loop iteration, and the writes to make once the keeper has
        # these entries.
        self._entries: list[bytes] = []
        self._writes: list[Write] = []
        self._sent: deque[list[Write]] = deque()
        # Connections whose output (``_held``) or input (``_unread``) is paused until
        # the keeper's socket has taken all entries.
        self._held: set[Recorded] = set()
        self._unread: set[Recorded] = set()
        self._reading: set[Recorded] = set()  # connections read from in this iteration
        # Answer to ``LEAVING``: numbers of the connections that another gateway cannot
        # take; None: there is no other gateway.
        self._may_hand_over: asyncio.Future[frozenset[int] | None] | None = None
        # Answers to ``FIND``, by number of the connection that asks.
        self._finding: dict[int, asyncio.Future[Place]] = {}

    @property
    def is_protected(self) -> bool:
        """True while there is a keeper."""
        return self._channel is not None

    # Recording.

    def add(self, connection: Recorded) -> None:
        self._connections[connection.record.number] = connection
        self._arriving.discard(connection.record.number)

    def remove(self, connection: Recorded) -> None:
        self._connections.pop(connection.record.number, None)
        self._arriving.discard(connection.record.number)
        for each in (self._held, self._unread, self._reading):
            each.discard(connection)

    def say(
        self, connection: Recorded, kind: Kind, value: int = 0, payload: bytes = b""
    ) -> None:
        """Record an entry of a connection, in this gateway and at the keeper."""
        record = connection.record
        if record.note(kind, value, payload):
            connection.settle()
            if len(record.input) > MIRROR_BYTES:
                record.give_up()
        if self._channel is None:
            return
        self._soon()
        self._entries.append(entry(kind, record.number, value, payload))

    def split(self, connection: Recorded, number: int) -> ConnectionRecord:
        """Move the current request to a new record, which has no client."""
        connection.settle()
        made = connection.record.split(number)
        if self._channel is not None:
            self._soon()
            self._entries.append(entry(Kind.SPLIT, connection.record.number, number))
        return made

    async def find(self, connection: Recorded, stream: bytes) -> Place:
        """Ask the keeper where the stream with this id is kept.

        Raises:
            KeeperLostError: The keeper is lost, or does not answer.
        """
        if self._channel is None:
            raise KeeperLostError(NO_ANSWER)
        number = connection.record.number
        found: asyncio.Future[Place] = self._loop.create_future()
        self._finding[number] = found
        self._soon()
        self._entries.append(entry(Kind.FIND, number, 0, stream))
        try:
            async with asyncio.timeout(FIND_S):
                return await found
        except TimeoutError:
            raise KeeperLostError(NO_ANSWER) from None
        finally:
            self._finding.pop(number, None)

    async def move(self, connection: Recorded, stream: bytes) -> bool:
        """Hand the connection to the gateway that has a stream; False: no keeper."""
        if not await self._is_flushed():
            return False
        connection.abandon()
        self._entries.append(entry(Kind.RELEASED, connection.record.number, 0, stream))
        self._flush()
        return True

    def after_reading(self, connection: Recorded, take: Callable[[], None]) -> None:
        """Call ``take`` once the keeper has the input; pause reading until then.

        ``_flush`` pauses reading early enough: the event loop first runs the callbacks
        that the previous iteration scheduled, and only then reads from sockets.
        """
        if self._channel is None:
            _write_all([(connection, take)])
            return
        self._soon()
        self._writes.append((connection, take))
        self._reading.add(connection)

    def then(self, connection: Recorded, write: Callable[[], None]) -> None:
        """Call ``write`` once the keeper has all entries; at once without a keeper."""
        if self._channel is None:
            _write_all([(connection, write)])
            return
        self._soon()
        self._writes.append((connection, write))
        if self._channel.is_blocked and connection not in self._held:
            self._held.add(connection)
            connection.hold()

    def _soon(self) -> None:
        if not self._entries and not self._writes:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        entries, writes = self._entries, self._writes
        self._entries, self._writes = [], []
        if self._channel is None:
            _write_all(writes)
            return
        if entries or writes:
            self._sent.append(writes)
            *several, last = frames(entries)
            for each in several:
                self._channel.send(each)
            self._channel.send(last, on_sent=self._on_sent)
        if self._sent:
            for connection in self._reading:
                connection.pause_reading()
            self._unread |= self._reading
        self._reading.clear()

    def _on_sent(self) -> None:
        _write_all(self._sent.popleft())
        if (self._held or self._unread) and not self._sent:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, set()
        for connection in held:
            connection.resume()
        unread, self._unread = self._unread, set()
        for connection in unread:
            connection.resume_reading()

    # The keeper.

    async def run(self) -> None:
        """Connect to the keeper, and reconnect whenever it is lost, until cancelled."""
        try:
            while True:
                channel = await self._reached()
                self._begin(channel)
                await self._beat(channel)
        finally:
            self.close()

    async def _reached(self) -> Channel:
        self._lost.clear()
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(str(self._path))
            except OSError:
                sock.close()
                await asyncio.sleep(AGAIN_S)
                continue
            return Channel(sock, self._framed, self._keeper_lost)

    def _begin(self, channel: Channel) -> None:
        """Greet a keeper; send listeners and records, because the keeper may be new."""
        self._unanswered = 0
        hello = entry(Kind.HELLO, 0, PROTOCOL, self._name.encode())
        channel.send(frame([hello]))
        for listener in self._listeners:
            channel.send(frame([entry(Kind.LISTENER)]), [listener.fileno()])
        for connection in self._connections.values():
            number, record = connection.fileno(), connection.record
            if number < 0 and not record.is_detached:
                continue  # the connection is closed
            connection.settle()
            descriptors = [number] if number >= 0 else []
            for data in record.frames():
                if not channel.send(data, descriptors):
                    break  # no descriptors left: the connection stays unprotected
                descriptors = []
        self._channel = channel
        if self._is_ready and not self._is_leaving:
            channel.send(frame([entry(Kind.READY)]))

    async def _beat(self, channel: Channel) -> None:
        while not self._lost.is_set():
            channel.send(frame([entry(Kind.BEAT)]))
            self._unanswered += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s):
                    await self._lost.wait()
            # Count heartbeats instead of seconds: this process may have been paused.
            if self._unanswered * self._beat_s > self._silence_s + KEEPER_S:
                logger.error(
                    "the stream keeper does not respond; streams continue without it"
                )
                channel.lose()

    def _framed(self, entries: list[Entry], descriptors: deque[int]) -> None:
        self._unanswered = 0
        for each in entries:
            match each.kind:
                case Kind.BEAT:
                    pass
                case Kind.LISTENER:
                    add_socket(descriptors.popleft(), self._listeners)
                case Kind.HAND_OVER:
                    kept = struct.unpack(f"<{len(each.payload) // 8}Q", each.payload)
                    if self._may_hand_over and not self._may_hand_over.done():
                        numbers = frozenset(kept) if each.value else None
                        self._may_hand_over.set_result(numbers)
                case Kind.CONNECTION:
                    self._given[each.connection] = [each]
                case Kind.COMPLETE:
                    record = record_of([*self._given.pop(each.connection), each])
                    sock = None
                    if not record.is_detached:
                        sock = socket.socket(fileno=descriptors.popleft())
                    if record.is_busy and self._channel is not None:
                        self._channel.send(frame([entry(Kind.TAKEN, record.number)]))
                    self._arriving.add(record.number)
                    self._serve(sock, record)
                case Kind.FIND:
                    found = self._finding.get(each.connection)
                    if found is not None and not found.done():
                        found.set_result(Place(each.value))
                case _:
                    self._given[each.connection].append(each)

    def _keeper_lost(self) -> None:
        if not self._is_leaving:
            logger.warning("the stream keeper is lost; waiting for the next one")
        self._channel = None
        for found in (*self._finding.values(), self._may_hand_over):
            if found is not None and not found.done():
                found.set_exception(KeeperLostError(NO_ANSWER))
        self._lost.set()
        for writes in (*self._sent, self._writes):
            _write_all(writes)
        self._sent.clear()
        self._reading.clear()
        self._writes, self._entries = [], []
        self._release()

    # This gateway.

    def ready(self) -> None:
        """Report to the keeper that this gateway takes connections."""
        self._is_ready = True
        if self._channel is not None:
            self._channel.send(frame([entry(Kind.READY)]))

    async def leave(self, limit_s: float) -> bool | None:
        """Stop taking connections; return whether protected ones are handed over.

        None: no keeper has answered; ``leave`` may be called again.
        """
        self._is_leaving = True
        if self._channel is None:
            return None
        self._may_hand_over = self._loop.create_future()
        self._channel.send(frame([entry(Kind.LEAVING)]))
        try:
            async with asyncio.timeout(limit_s):
                kept = await self._may_hand_over
                if kept is None:
                    return False
                if not await self._is_flushed():
                    return None
                while self._arriving:  # noqa: ASYNC110 - an event loop turn or two
                    await asyncio.sleep(AGAIN_S)
        except (TimeoutError, KeeperLostError):
            return None
        # Release kept streams first (they have descriptor -1), so that the keeper can
        # give the connections that read them to the same gateways.
        found = sorted(self._connections.items(), key=lambda each: each[1].fileno())
        for number, connection in found:
            if number not in kept:
                connection.abandon()
                self._entries.append(entry(Kind.RELEASED, number))
        self._flush()
        return True

    @property
    def has_connections(self) -> bool:
        """True while this gateway has connections, or kept streams without one."""
        return bool(self._connections or self._arriving)

    async def _is_flushed(self) -> bool:
        """Wait until the keeper has all entries; return False if the keeper is lost."""
        while (channel := self._channel) is not None:
            self._flush()
            if not channel.is_blocked:
                return True
            await asyncio.sleep(AGAIN_S)
        return False

    async def flush(self, limit_s: float) -> None:
        """Wait until the keeper has all entries, for at most ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._is_flushed()

    def close(self) -> None:
        """Close the channel to the keeper and the listening sockets."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()


def _write_all(writes: list[Write]) -> None:
    """Call all writes; if one fails, close its connection and continue."""
    for connection, write in writes:
        try:
            write()
        except Exception as error:
            logger.warning("cannot write to a client's connection: %s", error)
            connection.fail()
