"""The record with which another gateway can take over a client's connection. Pure.

The keeper and the gateway that serves the connection each have a copy of the record: if
one of them is lost, the other still has it. The kernel's count of written bytes shows
which part of the recorded output is still to be written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from multiworld.serve.keeper.frames import (
    PIECE_BYTES,
    Entry,
    FrameError,
    Kind,
    entry,
    frames,
)

# Format of a record's numbers and flags, in the order of ``COUNTED``.
COUNTERS = struct.Struct("<QQQQQQQQ??????")
COUNTED = (
    *("written_before", "read_before", "output_at", "input_at", "began_ns"),
    *("answered", "events", "losses"),
    *("is_admitted", "has_interim", "has_begun"),
    *("is_closing", "is_protected", "is_detached"),
)

# Bytes of output above which a record drops the output that the kernel has: during an
# answer, and on an idle connection.
TRIM_BYTES, IDLE_BYTES = 16 * 1024, 4 * 1024

# Maximum number of noted entries, and their maximum bytes, before they are applied.
NOTED, NOTED_BYTES = 64, 16 * 1024

# Maximum bytes of recorded input while it includes answered requests.
ANSWERED_BYTES = 256 * 1024


class State(StrEnum):
    """State of a connection."""

    IDLE = "idle"  # no request
    READING = "reading"  # a request is arriving, or being computed
    RECORDED = "recorded"  # like READING; the request's ``Drawn`` is recorded
    ANSWERING = "answering"  # a part of the answer is recorded
    CLOSED = "closed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.IDLE: frozenset({State.READING, State.CLOSED}),
    # To idle: the input was an empty line. To answering: the answer needs no recorded
    # ``Drawn``, because nothing in it is random.
    State.READING: frozenset(
        {State.RECORDED, State.ANSWERING, State.IDLE, State.CLOSED}
    ),
    State.RECORDED: frozenset({State.ANSWERING, State.CLOSED}),
    # To reading: one of several pipelined requests is answered.
    State.ANSWERING: frozenset({State.READING, State.IDLE, State.CLOSED}),
    State.CLOSED: frozenset(),
}


@dataclass(slots=True, eq=False)
class ConnectionRecord:
    """The record of a connection."""

    number: int  # unique among the connections of a keeper and its successors
    written_before: int = 0  # the kernel's count of bytes written, at the accept
    read_before: int = 0  # the kernel's count of bytes read, at the accept
    # Bytes read since the connection was last idle, and number of bytes before them.
    input: bytearray = field(default_factory=bytearray)
    input_at: int = 0
    began_ns: int = 0  # monotonic time in ns at which the current request began
    answered: int = 0  # number of answered requests in ``input``
    is_admitted: bool = False  # the current request was within its tenant's limits
    request: bytes = b""  # encoded ``Drawn`` of the current request; empty: none yet
    # Encoded tokens of the current answer, in order.
    items: list[bytes] = field(default_factory=list)
    events: int = 0  # number of the current answer's events in the recorded output
    # Number of gateways that were lost after they began to read the current request.
    # Each recorded part of the answer resets the number to 0.
    losses: int = 0
    has_interim: bool = False  # the current answer's interim response is recorded
    has_begun: bool = False  # bytes of the current answer are recorded
    # Bytes for the client that are not dropped yet (of all answers on the connection),
    # and number of bytes before them.
    output: bytearray = field(default_factory=bytearray)
    output_at: int = 0
    is_closing: bool = False  # the connection closes after ``output``
    # False: the record lacks input or tokens, so losing the gateway also loses the
    # current requests.
    is_protected: bool = True
    is_detached: bool = False  # the record of a kept stream, without a client
    stream: bytes = b""  # id of the kept stream, or of the one that the answer reads
    noted: list[Entry] = field(default_factory=list)  # entries that are not yet applied
    noted_bytes: int = 0
    item_bytes: int = 0
    state: State = State.IDLE
    is_taken: bool = True

    @property
    def size(self) -> int:
        """Bytes of the record's contents, roughly."""
        held = len(self.input) + len(self.output) + len(self.request)
        return held + self.item_bytes + 64 * len(self.items)

    @property
    def is_busy(self) -> bool:
        """True while a request is in flight."""
        return self.state not in (State.IDLE, State.CLOSED)

    def become(self, state: State) -> None:
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise FrameError(f"a connection cannot go from {self.state} to {state}")
        self.state = state

    def apply(self, said: Entry) -> None:
        """Apply a gateway's entry; raise FrameError if it does not fit the state."""
        value, payload = said.value, said.payload
        match said.kind:  # the most frequent kinds first
            case Kind.ITEM:
                self.losses = 0
                if self.is_protected:
                    self.items.append(payload)
                    self.item_bytes += len(payload)
            case Kind.OUTPUT:
                self.losses = 0
                if self.state is not State.IDLE:
                    self.become(State.ANSWERING)
                    self.has_begun, self.events = True, value
                self.output += payload
            case Kind.INPUT:
                if self.state is State.IDLE:
                    self.state, self.began_ns = State.READING, value
                self._read(payload)
            case Kind.IDLE:
                self.become(State.IDLE)
                self._end_answer()
                self.input_at += len(self.input)
                self.input.clear()
                self.answered, self.is_protected = 0, True
            case Kind.ANSWERED:
                self.become(State.ANSWERING)
                self.become(State.READING)
                self.answered += 1
                self.began_ns = value
                self._end_answer()
            case Kind.REQUEST:
                if self.state is State.READING:
                    self.state = State.RECORDED
                self.request = payload
            case Kind.ADMITTED:
                self.is_admitted = True
            case Kind.TAKEN:
                self.is_taken = True
            case Kind.CLOSING:
                self.is_closing = True
            case Kind.CLOSED:
                self.become(State.CLOSED)
            case Kind.KEPT:
                self.stream = payload
            case Kind.INTERIM:
                self.has_interim = True
                self.output += payload
            case Kind.SKIPPED:
                self.give_up()
                self.input_at += value
            case Kind.WRITTEN:
                self.become(State.ANSWERING)
                self.has_begun = True
                self.give_up()
                self.drop_output()
                self.output_at += value
            case _:
                raise FrameError(f"entry {said.kind.name} is not about a connection")

    def note(self, kind: Kind, value: int, payload: bytes) -> bool:
        """Note an entry for ``settle`` to apply; return whether ``settle`` is due."""
        self.noted.append(Entry(kind, self.number, value, payload))
        self.noted_bytes += len(payload)
        return self.noted_bytes > NOTED_BYTES or len(self.noted) > NOTED

    def settle(self) -> None:
        """Apply all noted entries."""
        noted, self.noted, self.noted_bytes = self.noted, [], 0
        for said in noted:
            self.apply(said)

    def _read(self, data: bytes) -> None:
        if not self.is_protected:
            self.input_at += len(data)
            return
        self.input += data
        if self.answered and len(self.input) > ANSWERED_BYTES:
            self.give_up()  # most of the input belongs to answered requests

    def _end_answer(self) -> None:
        self.request, self.stream, self.events, self.losses = b"", b"", 0, 0
        self.has_interim = self.has_begun = self.is_admitted = False
        self.items.clear()
        self.item_bytes = 0

    def give_up(self) -> None:
        """Stop protecting the current requests; drop their input and tokens."""
        self.is_protected = False
        self.settle()
        self.input_at += len(self.input)
        self.input.clear()
        self.items.clear()
        self.item_bytes = 0

    def drop_output(self) -> None:
        """Drop the output; until the kernel has all of it, no gateway can take over."""
        self.output_at += len(self.output)
        self.output.clear()

    def split(self, number: int) -> ConnectionRecord:
        """Return a new record, without a client, to which the current stream moves."""
        self.settle()
        made = ConnectionRecord(number, is_detached=True)
        made.input, made.items = bytearray(self.input), list(self.items)
        for name in ("began_ns", "answered", "is_admitted", "request", "losses"):
            setattr(made, name, getattr(self, name))
        made.is_protected, made.item_bytes = self.is_protected, self.item_bytes
        made.stream, made.state = self.stream, State.RECORDED
        self.items.clear()
        self.item_bytes = 0
        return made

    def trim(self, written: int) -> None:
        """Drop output that the kernel has; ``written`` is the kernel's count."""
        done = written - self.written_before - self.output_at
        if done > 0:
            done = min(done, len(self.output))
            del self.output[:done]
            self.output_at += done

    def has_all(self, written: int, read: int) -> bool:
        """Return whether the record has all input and all unwritten output."""
        has_read = read - self.read_before <= self.input_at + len(self.input)
        end = self.output_at + len(self.output)
        return has_read and self.output_at <= written - self.written_before <= end

    def entries(self) -> Iterator[bytes]:
        """Yield the entries; the client's descriptor must be sent with the first."""
        counters = COUNTERS.pack(*(getattr(self, name) for name in COUNTED))
        yield entry(Kind.CONNECTION, self.number, self.is_detached, counters)
        for piece in _pieces(self.input):
            yield entry(Kind.INPUT, self.number, self.began_ns, piece)
        if self.request:
            yield entry(Kind.REQUEST, self.number, 0, self.request)
        if self.stream:
            yield entry(Kind.KEPT, self.number, 0, self.stream)
        for item in self.items:
            yield entry(Kind.ITEM, self.number, 0, item)
        for piece in _pieces(self.output):
            yield entry(Kind.OUTPUT, self.number, self.events, piece)
        yield entry(Kind.COMPLETE, self.number, list(State).index(self.state))

    def frames(self) -> list[bytes]:
        """Return the frames; the client's descriptor must be sent with the first."""
        return frames(self.entries(), PIECE_BYTES)


def _pieces(data: bytearray) -> Iterator[bytes]:
    for at in range(0, len(data), PIECE_BYTES):
        yield bytes(data[at : at + PIECE_BYTES])


def record_of(entries: list[Entry]) -> ConnectionRecord:
    """Rebuild a record from its entries; FrameError: they are not a whole record."""
    first, *rest, last = entries
    record = ConnectionRecord(first.connection)
    try:
        counted = COUNTERS.unpack(first.payload)
        state = list(State)[last.value]
    except (struct.error, IndexError) as error:
        raise FrameError(str(error)) from error
    for name, value in zip(COUNTED, counted, strict=True):
        setattr(record, name, value)
    for said in rest:
        match said.kind:
            case Kind.INPUT:
                record.input += said.payload
            case Kind.REQUEST:
                record.request = said.payload
            case Kind.KEPT:
                record.stream = said.payload
            case Kind.ITEM:
                record.items.append(said.payload)
                record.item_bytes += len(said.payload)
            case Kind.OUTPUT:
                record.output += said.payload
            case _:
                raise FrameError(f"entry {said.kind.name} is not part of a record")
    record.state = state
    return record
