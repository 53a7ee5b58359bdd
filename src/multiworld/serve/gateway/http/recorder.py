"""Recording of connections, so that another gateway can continue them.

``Recorder`` links the HTTP protocol to the stream keeper: the protocol reports what it
reads and writes, and where requests and answers end. A recorder made from another
gateway's record makes the protocol continue the connection at the exact byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from multiworld.serve.gateway.http.keeper_link import KeeperLink
from multiworld.serve.gateway.http.kept_events import EventLog
from multiworld.serve.keeper import counters
from multiworld.serve.keeper.frames import MAX_ENTRY, Kind, Place
from multiworld.serve.keeper.record import ConnectionRecord
from multiworld.serve.wire.generation_messages import TokenItem

ANSWER = "multiworld.answer"  # scope key of the ``AnswerRecord`` of the request

KEY_BYTES = 16


class Drawn(msgspec.Struct, array_like=True):
    """Random key and other choices of a request, which another gateway must repeat."""

    key: bytes  # seed of all random numbers of the request
    made_at: float  # wall clock
    # Monotonic time, which all processes of a host share; None: not known yet.
    deadline_at: float | None = None
    version: str = ""  # of the model
    identity: str = ""  # name of the version's identity; empty: not known
    noise: dict[int, str] = {}  # noise source of each choice's tokens, by its index


_items = msgspec.msgpack.Decoder(tuple[int, TokenItem])
_drawn = msgspec.msgpack.Decoder(Drawn)
_encode = msgspec.msgpack.Encoder().encode


class AnswerRecord:
    """The record of one request's answer.

    Args:
        record: Record of the connection.
        say: Records an entry of the connection.
        is_resumed: Whether another gateway has had the request.
        on_log: Called once the answer has a log, which clients may read again.
        clock: Monotonic clock.

    Attributes:
        has_begun: Whether another gateway has sent bytes of the answer.
    """

    def __init__(
        self,
        record: ConnectionRecord,
        say: Callable[..., None],
        *,
        is_resumed: bool = False,
        on_log: Callable[[AnswerRecord], object] = lambda answer: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._clock = say, clock
        self.is_resumed, self._began_at = is_resumed, record.began_ns / 1e9
        self.has_begun = record.has_begun
        self.is_detached = record.is_detached
        # Id of the kept stream that the answer reads (empty: none), and its log in this
        # gateway.
        self.stream = "" if record.is_detached else record.stream.decode()
        self.log: EventLog | None = None
        self._on_log, self._on_log_end = on_log, _nothing
        self._events = 0  # number of the answer's events so far
        self._before = record.events  # number of events that another gateway has sent
        self._items = list(record.items)
        if record.request:
            self.drawn = _drawn.decode(record.request)
        else:
            self.drawn = Drawn(secrets.token_bytes(KEY_BYTES), time.time())

    def admitted(self) -> None:
        """Record that the request is within its tenant's limits."""
        if not self.is_resumed:
            self._say(Kind.ADMITTED)

    def keep(self) -> None:
        """Record ``drawn`` after a change."""
        self._say(Kind.REQUEST, 0, _encode(self.drawn))

    def token(self, purpose: str, size: int = 12) -> str:
        """Return a random hexadecimal number, the same at every gateway."""
        found = hashlib.blake2b(purpose.encode(), key=self.drawn.key, digest_size=size)
        return found.hexdigest()

    @property
    def seed(self) -> int:
        """A random number of 63 bits, the same at every gateway."""
        return int(self.token("seed", 8), 16) >> 1

    @property
    def spent_s(self) -> float:
        """Seconds since the request began, if another gateway has had it; else 0."""
        return self._clock() - self._began_at if self.is_resumed else 0.0

    def replayed(self) -> Iterator[tuple[int, TokenItem]]:
        """Yield the choices and tokens that another gateway has shown, in order."""
        items, self._items = self._items, []
        for item in items:
            yield _items.decode(item)

    def add(self, choice: int, item: TokenItem) -> None:
        """Record a token before it is shown."""
        self._say(Kind.ITEM, 0, _encode((choice, item)))

    def count_event(self) -> bool:
        """Count an event of the answer; return whether the client lacks it."""
        self._events += 1
        return self._events > self._before

    def log_begun(self, log: EventLog) -> None:
        """Record that the answer has a log, which outlives its client."""
        self.log = log
        self._say(Kind.KEPT, 0, log.name.encode())
        self._on_log(self)

    def log_ended(self) -> None:
        """Record that clients can no longer resume reading the answer."""
        self.log = None
        self._on_log_end()

    def move(self, say: Callable[..., None], on_log_end: Callable[[], None]) -> None:
        """Record the answer with ``say``, of another connection, from now on."""
        self._say, self._on_log_end = say, on_log_end

    @property
    def events(self) -> int:
        """Number of events that the client has, including those being sent."""
        return max(self._events, self._before)


def _nothing() -> None:
    """Do nothing."""


def unrecorded() -> AnswerRecord:
    """Return an answer's record that is not stored anywhere."""
    return AnswerRecord(ConnectionRecord(0), lambda *said: None)


class Unrecorded:
    """The recorder of connections without a keeper."""

    taken_over: ConnectionRecord | None = None

    def begin(self, transport: Any, protocol: asyncio.Protocol) -> Any:
        """Return the transport that the protocol uses."""
        return transport

    def received(self, data: bytes) -> None:
        """Record what was read."""

    def skipped(self, size: int) -> None:
        """Record that ``size`` bytes were read and discarded."""

    def closing(self) -> None:
        """Record that the connection closes after the recorded output."""

    def answer(self) -> AnswerRecord:
        """Return the record of the request whose answer begins."""
        return unrecorded()

    def answered(self) -> None:
        """Record that an answer has ended while other requests are open."""

    def idle(self) -> None:
        """Record that no request is open."""

    def closed(self) -> None:
        """Record that the connection is closed."""

    async def find(self, stream: str) -> Place:
        """Return where the stream with this id is kept."""
        return Place.NOWHERE

    async def move(self, stream: str) -> bool:
        """Hand the connection to the gateway that has a stream; return whether done."""
        return False


class PeekedSocket(socket.socket):
    """A client's connection; bytes read stay in the kernel until ``take``.

    So if the gateway is lost, either the keeper or the kernel has all that it read.
    """

    _taken = memoryview(bytearray(256 * 1024))  # never read
    is_abandoned = False

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(size, flags | socket.MSG_PEEK)

    def close(self) -> None:
        """Shut down output, too, since the keeper's duplicate keeps the socket open."""
        if not self.is_abandoned:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_WR)
        super().close()

    def take(self, size: int) -> None:
        """Consume ``size`` bytes that were read before."""
        while size > 0 and self.fileno() >= 0:
            # The kernel discards them without copying (tcp(7), MSG_TRUNC).
            size -= self.recv_into(self._taken, size, socket.MSG_TRUNC) or size

    def take_recorded(self, record: ConnectionRecord) -> None:
        """Consume what an earlier gateway recorded but left in the kernel."""
        end = record.input_at + len(record.input)
        self.take(record.read_before + end - counters.read(self))


class Recorder(Unrecorded):
    """Records a connection at the keeper of its host.

    Args:
        link: Link to the keeper.
        record: The keeper's record of the connection.
        sock: Socket of the connection.
    """

    def __init__(
        self, link: KeeperLink, record: ConnectionRecord, sock: PeekedSocket
    ) -> None:
        self._link, self.record, self._sock = link, record, sock
        is_new = not (record.input or record.output or record.output_at)
        self.taken_over = None if is_new else record
        self._is_resumed = record.is_admitted  # whether the next request is
        self._continues = not is_new  # whether the next answer continues the record's
        self._answer: AnswerRecord | None = None
        self._transport: RecordedTransport | None = None
        self._protocol: asyncio.Protocol | None = None
        self.is_abandoned = False

    def begin(self, transport: Any, protocol: asyncio.Protocol) -> Any:
        self._transport = RecordedTransport(transport, self)
        self._protocol = protocol
        self._link.add(self)
        return self._transport

    def say(self, kind: Kind, value: int = 0, payload: bytes = b"") -> None:
        if not self.is_abandoned:
            self._link.say(self, kind, value, payload)

    def received(self, data: bytes) -> None:
        self.say(Kind.INPUT, time.monotonic_ns(), bytes(data))
        self._take(len(data))

    def skipped(self, size: int) -> None:
        self.say(Kind.SKIPPED, size)
        self._take(size)

    def _take(self, size: int) -> None:
        self._link.after_reading(self, partial(self._sock.take, size))

    def closing(self) -> None:
        self.say(Kind.CLOSING)

    def answer(self) -> AnswerRecord:
        record = self.record if self._continues else ConnectionRecord(0)
        self._answer = AnswerRecord(
            record, self.say, is_resumed=self._is_resumed, on_log=self._split
        )
        self._is_resumed = self._continues = False
        return self._answer

    def _split(self, answer: AnswerRecord) -> None:
        """Record a kept stream apart from its client's connection."""
        record = self._link.split(self, secrets.randbits(63))
        DetachedRecorder(self._link, record).take(answer)

    def answered(self) -> None:
        self._answer = None
        self.say(Kind.ANSWERED, time.monotonic_ns())

    def idle(self) -> None:
        self._answer, self._is_resumed = None, False
        self.say(Kind.IDLE)

    def closed(self) -> None:
        if not self.is_abandoned:
            self.say(Kind.CLOSED)
        self._link.remove(self)
        self.record.give_up()  # frees memory, as the protocol may outlive it
        self.record.output.clear()

    async def find(self, stream: str) -> Place:
        return await self._link.find(self, stream.encode())

    async def move(self, stream: str) -> bool:
        return await self._link.move(self, stream.encode())

    def output(
        self, data: bytes, *, is_interim: bool, write: Callable[[], None]
    ) -> None:
        """Record ``data`` for the client, and then call ``write``."""
        if is_interim:
            self.say(Kind.INTERIM, 0, data)
        elif len(data) > MAX_ENTRY:
            self.say(Kind.WRITTEN, len(data))
        else:
            events = 0 if self._answer is None else self._answer.events
            self.say(Kind.OUTPUT, events, data)
        self._link.then(self, write)

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call`` after the output recorded so far was written."""
        self._link.then(self, call)

    def settle(self) -> None:
        record = self.record
        record.settle()
        waiting = self._transport.get_write_buffer_size() if self._transport else 0
        done = len(record.output) - waiting
        if done > 0:
            record.output_at += done
            del record.output[:done]

    # For the link.

    def fileno(self) -> int:
        sock = self._transport and self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def hold(self) -> None:
        assert self._protocol is not None
        self._protocol.pause_writing()

    def resume(self) -> None:
        transport, protocol = self._transport, self._protocol
        if transport and protocol and not transport.unsent:
            protocol.resume_writing()

    def fail(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading("keeper")

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading("keeper")

    def abandon(self) -> None:
        self.is_abandoned = self._sock.is_abandoned = True
        if self._transport is not None:
            self._transport.abandon()


class DetachedRecorder(Unrecorded):
    """Records a kept stream, with or without a client.

    Args:
        link: Link to the keeper.
        record: Record of the stream; by an earlier gateway if the stream moved here.
    """

    def __init__(self, link: KeeperLink, record: ConnectionRecord) -> None:
        self._link, self.record = link, record
        self.taken_over = record
        self._answer: AnswerRecord | None = None
        self._is_ended = False
        link.add(self)

    def take(self, answer: AnswerRecord) -> None:
        """Record an answer from now on, until its log ends."""
        self._answer = answer
        answer.move(self._say, self._end)

    def _say(self, kind: Kind, value: int = 0, payload: bytes = b"") -> None:
        if not self._is_ended:
            self._link.say(self, kind, value, payload)

    def _end(self) -> None:
        self._say(Kind.CLOSED)
        self._is_ended = True
        self._link.remove(self)

    def answer(self) -> AnswerRecord:
        answer = AnswerRecord(self.record, self._say, is_resumed=True)
        self.take(answer)
        return answer

    def idle(self) -> None:
        if self._answer is None or self._answer.log is None:
            self._end()  # the stream could not be continued

    def closed(self) -> None:
        self.idle()

    # For the link.

    def fileno(self) -> int:
        return -1

    def hold(self) -> None:
        """Do nothing: there is no output."""

    resume = fail = pause_reading = resume_reading = hold

    def settle(self) -> None:
        self.record.settle()

    def abandon(self) -> None:
        self._is_ended = True
        if self._answer is not None and self._answer.log is not None:
            self._answer.log.end()


class NoTransport(asyncio.Transport):
    """The transport of a connection without a client."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._is_closing = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Do nothing."""

    def write_eof(self) -> None:
        """Do nothing."""

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(
        self, high: int | None = None, low: int | None = None
    ) -> None:
        """Do nothing: nothing is buffered."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Do nothing: there is no input."""

    resume_reading = pause_reading

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._protocol.connection_lost, None)

    abort = close


class RecordedTransport:
    """A transport whose output goes to the keeper before it goes to the client."""

    def __init__(self, transport: Any, recorder: Recorder) -> None:
        self._transport, self._recorder = transport, recorder
        self._waiting = 0  # bytes that the keeper does not have yet
        self._is_closing = False
        self._pauses: set[str] = set()  # names of those that have paused reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self, by: str = "protocol") -> None:
        self._pauses.add(by)
        self._transport.pause_reading()

    def resume_reading(self, by: str = "protocol") -> None:
        self._pauses.discard(by)
        if not self._pauses:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        self._write(data, is_interim=False)

    def write_interim(self, data: bytes) -> None:
        """Write an interim response, which precedes an answer."""
        self._write(data, is_interim=True)

    def _write(self, data: bytes, *, is_interim: bool) -> None:
        if not data or self._is_closing:
            return
        self._waiting += len(data)
        write = partial(self._write_now, data)
        self._recorder.output(data, is_interim=is_interim, write=write)

    def _write_now(self, data: bytes) -> None:
        self._waiting -= len(data)
        if not self._transport.is_closing():
            self._transport.write(data)

    def write_unrecorded(self, data: bytes) -> None:
        """Write output that another gateway has recorded."""
        self._transport.write(data)

    @property
    def unsent(self) -> int:
        """Bytes waiting for room in the kernel's buffer."""
        return int(self._transport.get_write_buffer_size())

    def write_eof(self) -> None:
        self._recorder.then(self._end)

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone
            self._transport.write_eof()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._recorder.say(Kind.CLOSING)
            self._recorder.then(self._transport.close)

    def is_closing(self) -> bool:
        return self._is_closing or bool(self._transport.is_closing())

    def get_write_buffer_size(self) -> int:
        return int(self._transport.get_write_buffer_size()) + self._waiting

    def abandon(self) -> None:
        """Release the socket; the keeper's duplicate keeps the connection open."""
        self._is_closing = True
        self._transport.abort()
