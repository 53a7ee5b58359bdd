"""Recording of connections, so that another gateway can continue them.

``Recorder`` links the HTTP protocol to the stream keeper: the protocol reports what it
reads and writes, and where requests and answers end. If a recorder is made from another
gateway's record, the protocol continues the connection at the exact byte.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from multiworld.serve.gateway.http.answer_record import AnswerRecord, unrecorded
from multiworld.serve.gateway.http.keeper_link import KeeperLink, Recorded
from multiworld.serve.gateway.http.recorded_transport import (
    PeekedSocket,
    RecordedTransport,
)
from multiworld.serve.keeper.connection_record import ConnectionRecord
from multiworld.serve.keeper.frames import MAX_ENTRY, Kind, Place


class Unrecorded:
    """The recorder of connections without a keeper."""

    taken_over: ConnectionRecord | None = None
    is_abandoned = False  # True: another gateway continues the connection
    is_single = False  # True: only the first request that is not answered is served

    def begin(self, transport: Any, protocol: asyncio.Protocol) -> Any:
        """Return the transport that the protocol uses."""
        return transport

    def received(self, data: bytes) -> None:
        """Record bytes that were read."""

    def skipped(self, size: int) -> None:
        """Record that ``size`` bytes were read and discarded."""

    def closing(self) -> None:
        """Record that the connection closes after the recorded output."""

    def begin_answer(self) -> AnswerRecord:
        """Return the record of the request whose answer begins."""
        return unrecorded()

    def answered(self) -> None:
        """Record that an answer has ended, but other requests are open."""

    def idle(self) -> None:
        """Record that no request is open."""

    def closed(self) -> None:
        """Record that the connection is closed."""

    async def find(self, stream: str) -> Place:
        """Return where the stream with this id is kept."""
        return Place.NOWHERE

    async def move(self, stream: str) -> bool:
        """Hand the connection to the gateway that has a stream; False: not possible."""
        return False


class Recorder(Unrecorded, Recorded):
    """Records a connection at the keeper of its host; ``record`` is the keeper's."""

    def __init__(
        self, link: KeeperLink, record: ConnectionRecord, sock: PeekedSocket
    ) -> None:
        self._link, self.record, self._sock = link, record, sock
        is_new = not (record.input or record.output or record.output_at)
        self.taken_over = None if is_new else record
        self._is_resumed = record.is_admitted  # whether the next request is resumed
        self._continues = not is_new  # whether the next answer continues a recorded one
        self._answer: AnswerRecord | None = None
        self._transport: RecordedTransport | None = None
        self._protocol: asyncio.Protocol | None = None

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

    def begin_answer(self) -> AnswerRecord:
        record = self.record if self._continues else ConnectionRecord(0)
        self._answer = AnswerRecord(
            record,
            self.say,
            is_resumed=self._is_resumed,
            on_log=self._split,
            is_abandoned=lambda: self.is_abandoned,
        )
        self._is_resumed = self._continues = False
        return self._answer

    def _split(self, answer: AnswerRecord) -> int:
        """Record a kept stream separately from its client's connection."""
        record = self._link.split(self, secrets.randbits(63))
        DetachedRecorder(self._link, record).take(answer)
        return record.size

    def answered(self) -> None:
        self._answer, self._continues = None, False
        self.say(Kind.ANSWERED, time.monotonic_ns())

    def idle(self) -> None:
        self._answer, self._is_resumed, self._continues = None, False, False
        self.say(Kind.IDLE)

    def closed(self) -> None:
        if not self.is_abandoned:
            self.say(Kind.CLOSED)
        self._link.remove(self)
        self.record.give_up()  # frees memory: the protocol may live longer
        self.record.output.clear()

    async def find(self, stream: str) -> Place:
        return await self._link.find(self, stream.encode())

    async def move(self, stream: str) -> bool:
        return await self._link.move(self, stream.encode())

    def output(
        self, data: bytes, *, is_interim: bool, write: Callable[[], None]
    ) -> None:
        """Record ``data`` for the client; call ``write`` once the keeper has it."""
        if is_interim:
            self.say(Kind.INTERIM, 0, data)
        elif len(data) > MAX_ENTRY:
            self.say(Kind.WRITTEN, len(data))
        else:
            events = 0 if self._answer is None else self._answer.events
            self.say(Kind.OUTPUT, events, data)
        self._link.then(self, write)

    def then(self, call: Callable[[], None]) -> None:
        """Run ``call`` once all output recorded so far has been written."""
        self._link.then(self, call)

    def settle(self) -> None:
        record = self.record
        record.settle()
        waiting = self._transport.get_write_buffer_size() if self._transport else 0
        done = len(record.output) - waiting
        if done > 0:
            record.output_at += done
            del record.output[:done]

    # Methods that ``KeeperLink`` calls.

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


class DetachedRecorder(Unrecorded, Recorded):
    """Records a kept stream, begun or moved here, with or without a client."""

    is_single = True  # the record may have requests that the client pipelined

    def __init__(self, link: KeeperLink, record: ConnectionRecord) -> None:
        self._link, self.record = link, record
        self.taken_over = record
        self._answer: AnswerRecord | None = None
        self._is_ended = False
        link.add(self)

    def take(self, answer: AnswerRecord) -> None:
        """Record an answer from now on, until the answer's log ends."""
        self._answer = answer
        answer.move(self._say, self._end, lambda: self.is_abandoned)

    def _say(self, kind: Kind, value: int = 0, payload: bytes = b"") -> None:
        if not self._is_ended:
            self._link.say(self, kind, value, payload)

    def _end(self) -> None:
        self._say(Kind.CLOSED)
        self._is_ended = True
        self._link.remove(self)

    def begin_answer(self) -> AnswerRecord:
        size = self.record.size
        answer = AnswerRecord(
            self.record, self._say, is_resumed=True, on_log=lambda _: size
        )
        self.take(answer)
        return answer

    def idle(self) -> None:
        if self._answer is None or self._answer.log is None:
            self._end()  # this gateway could not continue the stream

    def closed(self) -> None:
        self.idle()

    def abandon(self) -> None:
        self._is_ended = self.is_abandoned = True
        if self._answer is not None and self._answer.log is not None:
            self._answer.log.end()
