"""The keeper's decisions: which gateway serves which connection. Pure.

A connection belongs to one gateway, or waits for one. When its gateway is lost, the
connection's record decides whether another gateway continues it, the keeper refuses it
with 503, or the keeper closes it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from multiworld.serve.keeper.connection_record import (
    IDLE_BYTES,
    TRIM_BYTES,
    ConnectionRecord,
    State,
)
from multiworld.serve.keeper.frames import Entry, FrameError, Kind, Place, entry

WAIT_S = 60.0  # seconds that a connection waits for a gateway before it gets 503
MAX_LOSSES = 4  # lost gateways after which a request is refused as their likely cause
# Multiple of ``silence_s`` for which a gateway may be silent while it computes: on an
# overloaded machine, killing it would only move its load to the next gateway.
COMPUTES = 5
IDLE = 2  # idle ticks in a row before a silent gateway is killed; one may be chance
TICK_S = 0.2  # seconds between checks of gateways and of waiting connections
SLOW_S = 1.0  # seconds between checks of the output that slow clients have taken
# If two ticks are more than this many seconds apart, the keeper itself was paused.
PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Counters:
    """The kernel's counts of a connection's bytes; see ``counters.py``."""

    written: int
    read: int


class Counts(NamedTuple):
    """Counts of connections since the keeper started."""

    handed_over: int = 0  # to another gateway
    closed: int = 0  # closed because they could be neither continued nor refused
    refused: int = 0  # with 503
    unprotected: int = 0  # requests whose records did not fit into memory
    hung: int = 0  # gateways that were killed because they hung


@dataclass(frozen=True, slots=True)
class Give:
    """Send a connection and its record to a gateway."""

    connection: int
    gateway: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Answer 503, and close the connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection."""

    connection: int


@dataclass(frozen=True, slots=True)
class Trim:
    """Drop recorded output that the kernel has already taken."""

    connection: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a hung gateway, so that no two gateways write to one connection."""

    gateway: int


@dataclass(frozen=True, slots=True)
class Say:
    """Send an entry to a gateway."""

    gateway: int
    entry: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Call ``released`` with the counters of a connection that its gateway released."""

    connection: int
    stream: bytes = b""


Action = Release | Give | Refuse | Close | Trim | Kill | Say


@dataclass(slots=True, eq=False)
class Gateway:
    """A gateway that is connected to the keeper."""

    number: int
    heard_at: float
    name: str = ""
    is_ready: bool = False
    is_leaving: bool = False
    is_killed: bool = False
    idle: int = 0  # number of ticks in a row at which it was silent and idle
    connections: set[int] = field(default_factory=set)
    busy: int = 0  # number of connections with a request in flight
    given: int = 0  # number of connections given to it so far

    @property
    def takes_connections(self) -> bool:
        return self.is_ready and not self.is_leaving and not self.is_killed


class Keeper:
    """State of all connections of one host."""

    def __init__(
        self,
        silence_s: float,  # seconds without a message after which a gateway is killed
        max_bytes: int,  # of all records; beyond it, requests are unprotected
        active: int = 64,  # gateways that take connections at the same time
    ) -> None:
        self._silence_s, self._max_bytes = silence_s, max_bytes
        self.active = active
        self.gateways: dict[int, Gateway] = {}
        self.records: dict[int, ConnectionRecord] = {}
        self.size = 0  # bytes of all records
        # Time until which connections wait for the next service; None: they do not.
        self.awaited_until: float | None = None
        # Connections without a gateway, and the time when they began to wait.
        self.waiting: dict[int, float] = {}
        self._owner: dict[int, Gateway] = {}
        self.streams: dict[bytes, int] = {}  # connection number of each kept stream
        self._ticked_at: float | None = None
        # Connections whose clients had not taken all output at the last check.
        self._slow: set[int] = set()
        self._looked_at = 0.0
        self.handed_over = self.unprotected = self.refused = self.closed = 0
        self.hung = 0

    # Connections.

    def accepted(self, number: int, counters: Counters, now: float) -> list[Action]:
        """Give a new connection to a gateway."""
        record = ConnectionRecord(number, counters.written, counters.read)
        self.records[number] = record
        return self._place(number, now)

    def _place(
        self, number: int, now: float, preferred: Gateway | None = None
    ) -> list[Action]:
        able = self._able()[: self.active]
        if preferred is not None and preferred.takes_connections:
            able = [preferred]
        if not able:
            self.waiting.setdefault(number, now)
            is_ending = all(each.is_leaving for each in self.gateways.values())
            if self.gateways and is_ending and self.awaited_until is None:
                return self._give_up(number)  # the service shuts down
            return []
        self.waiting.pop(number, None)
        # ``given`` makes equally loaded gateways alternate.
        chosen = min(able, key=lambda g: (g.busy, len(g.connections), g.given))
        chosen.given += 1
        record = self.records[number]
        record.is_taken = not record.is_busy
        self._own(chosen, record)
        return [Give(number, chosen.number)]

    def _able(self) -> list[Gateway]:
        """Return the gateways that take connections, the lowest name first."""
        found = (each for each in self.gateways.values() if each.takes_connections)
        return sorted(found, key=lambda each: (len(each.name), each.name))

    def _own(self, gateway: Gateway, record: ConnectionRecord) -> None:
        gateway.connections.add(record.number)
        gateway.busy += record.is_busy
        self._owner[record.number] = gateway

    def _give_up(self, number: int) -> list[Action]:
        """Refuse a connection, or close it if an answer has begun."""
        record = self.records[number]
        has_output = record.has_begun or bool(record.output)
        self._forget(record)
        if has_output or (record.state is State.IDLE and record.output_at):
            self.closed += 1
            return [Close(number)]
        self.refused += 1
        return [Refuse(number)]

    def _forget(self, record: ConnectionRecord) -> None:
        del self.records[record.number]
        self._slow.discard(record.number)
        if self.streams.get(record.stream) == record.number:
            del self.streams[record.stream]
        self.size -= record.size
        self.waiting.pop(record.number, None)
        owner = self._owner.pop(record.number, None)
        if owner is not None:
            owner.connections.discard(record.number)
            owner.busy -= record.is_busy

    def _name(self, record: ConnectionRecord) -> None:
        if record.is_detached:
            self.streams[record.stream] = record.number

    def _owner_of(self, stream: bytes) -> Gateway | None:
        return self._owner.get(self.streams.get(stream, 0))

    def _split(self, gateway: Gateway, record: ConnectionRecord, number: int) -> None:
        if number in self.records:
            raise FrameError(f"connection {number} exists already")
        before = record.size
        made = record.split(number)
        self.records[number] = made
        self.size += made.size + record.size - before
        self._name(made)
        self._own(gateway, made)
        # Streams without clients may use at most half of the memory, so that they do
        # not displace the records of other connections.
        kept = sum(self.records[number].size for number in self.streams.values())
        if kept > self._max_bytes // 2:
            self._give_up_record(made)

    def gone(self, number: int) -> None:
        """Remove a waiting connection whose client has left."""
        self._forget(self.records[number])

    def trimmed(self, number: int, written: int) -> None:
        """Drop the output that the kernel has; ``written`` is the kernel's count."""
        record = self.records.get(number)
        if record is not None:
            before = record.size
            record.trim(written)
            self.size += record.size - before
            has_rest = len(record.output) > IDLE_BYTES
            (self._slow.add if has_rest else self._slow.discard)(number)

    # Services.

    def ending(self, wait_s: float, now: float) -> None:
        """Let connections wait up to ``wait_s`` for the next service."""
        self.awaited_until = now + wait_s

    def begun(self, now: float) -> None:
        """Restart the waits of connections, now for gateways of the next service."""
        self.awaited_until = None
        for number in self.waiting:
            self.waiting[number] = now

    def ended(self) -> list[Action]:
        """Refuse or close waiting connections, because no next service will start."""
        return [a for number in list(self.waiting) for a in self._give_up(number)]

    # Gateways.

    def joined(self, number: int, now: float) -> None:
        """Add a gateway that has connected."""
        self.gateways[number] = Gateway(number, now)

    def said(self, number: int, entries: Iterable[Entry], now: float) -> list[Action]:
        """Apply a gateway's frame; raise ``FrameError`` if an entry does not fit."""
        gateway = self.gateways[number]
        gateway.heard_at = now
        actions: list[Action] = []
        for each in entries:
            if each.kind >= Kind.CONNECTION:
                actions += self._recorded(gateway, each)
                continue
            match each.kind:
                case Kind.HELLO:
                    gateway.name = each.payload.decode(errors="replace")
                case Kind.BEAT:
                    actions.append(Say(number, entry(Kind.BEAT, 0, each.value)))
                case Kind.READY:
                    gateway.is_ready = True
                    actions += self._place_waiting(now)
                case Kind.LEAVING:
                    actions += self._leave(gateway)
        return actions

    def _leave(self, gateway: Gateway) -> list[Action]:
        gateway.is_leaving = True
        has_heir = bool(self._able()) or self.awaited_until is not None
        actions: list[Action]
        kept = [n for n in gateway.connections if not self.records[n].is_protected]
        numbers = struct.pack(f"<{len(kept)}Q", *kept)
        answer = entry(Kind.HAND_OVER, 0, int(has_heir), numbers)
        actions = [Say(gateway.number, answer)]
        if not has_heir and all(g.is_leaving for g in self.gateways.values()):
            for waiting in list(self.waiting):
                actions += self._give_up(waiting)
        return actions

    def _recorded(self, gateway: Gateway, said: Entry) -> list[Action]:
        number = said.connection
        record = self.records.get(number)
        if record is None or self._owner.get(number) is not gateway:
            return []  # the connection was closed meanwhile
        kind = said.kind
        match kind:  # about the gateway of the connection
            case Kind.RELEASED:
                return [Release(number, said.payload)]
            case Kind.FIND:
                return [Say(gateway.number, self._found(gateway, said))]
            case Kind.SPLIT:
                self._split(gateway, record, said.value)
                return []
        before, was_busy = record.size, record.is_busy
        record.apply(said)
        gateway.busy += record.is_busy - was_busy
        size = record.size
        self.size += size - before
        if record.state is State.CLOSED:
            self._forget(record)
            return [Close(number)]
        if self.size > self._max_bytes and size > before:
            self._give_up_record(record)
        limit = IDLE_BYTES if kind is Kind.IDLE else TRIM_BYTES
        return [Trim(number)] if len(record.output) > limit else []

    def _give_up_record(self, record: ConnectionRecord) -> None:
        """Stop recording a connection for lack of memory."""
        before = record.size
        self.unprotected += record.is_protected
        record.give_up()
        record.drop_output()
        self.size += record.size - before

    def _found(self, gateway: Gateway, said: Entry) -> bytes:
        owner = self._owner_of(said.payload)
        place = Place.NOWHERE if owner is None else Place.ELSEWHERE
        if owner is gateway:
            place = Place.HERE
        return entry(Kind.FIND, said.connection, place)

    def restored(self, number: int, record: ConnectionRecord, now: float) -> None:
        """Add a gateway's connection that an earlier keeper had recorded."""
        gateway = self.gateways[number]
        gateway.heard_at = now
        self.records[record.number] = record
        self.size += record.size
        if self.size > self._max_bytes:
            self._give_up_record(record)
        self._name(record)
        self._own(gateway, record)

    def lost(
        self, number: int, counters: Mapping[int, Counters], now: float
    ) -> list[Action]:
        """Give other gateways the connections of a gateway that has exited.

        Its frames have all been read; the kernel's counts were taken after its exit.
        """
        gateway = self.gateways.pop(number)
        actions: list[Action] = []
        # Place kept streams first, so that the connections that read them can go to the
        # same gateways.
        records = [self.records[number] for number in gateway.connections]
        records.sort(key=lambda each: (not each.is_detached, each.number))
        for record in records:
            connection = record.number
            record.losses += record.is_busy and record.is_taken
            actions += self._orphaned(connection, counters[connection], now)
        return actions

    def released(
        self, number: int, counters: Counters, now: float, stream: bytes = b""
    ) -> list[Action]:
        """Give a released connection to another gateway, preferably of ``stream``."""
        owner = self._owner.get(number)
        if owner is None:
            return []
        owner.connections.discard(number)
        owner.busy -= self.records[number].is_busy
        return self._orphaned(number, counters, now, stream)

    def _orphaned(
        self,
        number: int,
        counters: Counters,
        now: float,
        stream: bytes = b"",
    ) -> list[Action]:
        record = self.records[number]
        del self._owner[number]
        is_whole = record.has_all(counters.written, counters.read)
        is_whole &= record.losses < MAX_LOSSES
        self.trimmed(number, counters.written)
        if is_whole and (record.is_protected or record.state is State.IDLE):
            self.handed_over += 1
            return self._place(number, now, self._owner_of(stream or record.stream))
        return self._give_up(number)

    def undeliverable(self, number: int) -> list[Action]:
        """Refuse or close a connection that cannot be sent to its gateway."""
        return self._give_up(number)

    def _place_waiting(self, now: float) -> list[Action]:
        return [
            action
            for number in list(self.waiting)
            for action in self._place(number, now)
        ]

    @property
    def counts(self) -> Counts:
        return Counts(
            self.handed_over, self.closed, self.refused, self.unprotected, self.hung
        )

    # Time.

    def ticked(
        self, now: float, computes: Callable[[int], bool] = lambda number: False
    ) -> list[Action]:
        """Kill hung gateways; refuse or close connections that waited too long.

        ``computes``: returns whether a gateway computes, or waits for a core.
        """
        before, self._ticked_at = self._ticked_at, now
        if before is not None and now - before > PAUSE_S:
            for gateway in self.gateways.values():
                # The keeper was paused, so it may not have read the messages yet.
                gateway.heard_at = now
        actions: list[Action] = []
        if now - self._looked_at > SLOW_S:
            self._looked_at = now
            actions += [Trim(number) for number in self._slow]
        for gateway in self.gateways.values():
            silent_s = now - gateway.heard_at
            if not gateway.is_ready or gateway.is_killed or silent_s < self._silence_s:
                gateway.idle = 0
                continue
            gateway.idle = 0 if computes(gateway.number) else gateway.idle + 1
            if gateway.idle >= IDLE or silent_s > COMPUTES * self._silence_s:
                gateway.is_killed = True
                self.hung += 1
                actions.append(Kill(gateway.number))
        for number, since in list(self.waiting.items()):
            if now > max(since + WAIT_S, self.awaited_until or 0.0):
                actions += self._give_up(number)
        return actions
