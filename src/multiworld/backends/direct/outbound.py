"""From messages to bytes: the sending half of a lane. Knows no sockets.

Messages go out one after the other, each in frames of at most ``FRAGMENT_BYTES``. The
lane asks ``chunks`` for what to write next and says with ``advance`` how much was
written. A message can be withdrawn at any byte: the frame it is in is finished from a
copy, the rest is called off.
"""

from __future__ import annotations

import zlib
from asyncio import Future
from collections import deque
from collections.abc import Callable

from multiworld.backends.direct import header as wire
from multiworld.backends.direct.header import FRAGMENT_BYTES, Header
from multiworld.backends.direct.shared_memory import SLOT_BYTES, Ring
from multiworld.backends.mailbox import MESSAGE_BYTES, Description

SHARED_BYTES = 128 * 1024
"""From here on a payload goes through shared memory where there is any: copying it and
ringing costs less than two copies by the kernel."""


class Outgoing:
    """A message on its way out. ``future`` is done when its memory is free again."""

    __slots__ = ("description", "fragment", "future", "memory", "offset", "owner")

    def __init__(
        self,
        description: Description,
        memory: memoryview,
        owner: object,
        future: Future[None] | None,
    ) -> None:
        self.description, self.memory = description, memory
        self.owner = owner  # keeps the memory alive
        self.future = future
        self.offset = 0
        self.fragment = 0


class Outbound:
    """The queue of one lane."""

    def __init__(self, nonce: int, *, is_summed: bool) -> None:
        self._nonce, self._is_summed = nonce, is_summed
        self.ring: Ring | None = None
        self.is_starving = False  # a fragment waits for a slot of the ring
        self.shared_bytes = 0  # copied there by the last frame
        self._sequence = 0
        self._queue: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._frame: list[memoryview] = []
        self._notes: deque[int] = deque()
        self.queued_bytes = 0

    @property
    def is_idle(self) -> bool:
        """True when everything was written."""
        return not (self._frame or self._current or self._queue or self._notes)

    @property
    def has_frame(self) -> bool:
        """True while a frame is not written to its end."""
        return bool(self._frame)

    def put(self, message: Outgoing) -> None:
        """Append a message."""
        self._queue.append(message)
        self.queued_bytes += message.description.size + MESSAGE_BYTES

    def put_bell(self) -> None:
        """Tell the peer that a slot is free, before the next frame."""
        if wire.BELL not in self._notes:
            self._notes.append(wire.BELL)

    def announcement(self, slots: int) -> bytes:
        """Return the frame that a ring's descriptor travels with; see ``announced``."""
        return self._header(wire.MEMORY, slots)

    def announced(self, ring: Ring, head: bytes, written: int) -> None:
        """Take note that ``written`` bytes of the announcement have left; not 0."""
        self._sequence += 1
        self.ring = ring
        self._frame = [memoryview(head)]
        self.advance(written)

    def put_fin(self) -> None:
        """Append the last frame of all."""
        fin = Description(wire.FIN, 0, (), 0, 0, 0)
        self.put(Outgoing(fin, memoryview(b""), None, None))

    def chunks(self) -> list[memoryview]:
        """Return what to write next: the rest of one frame.

        Empty if idle, and while ``is_starving``.
        """
        if not self._frame:
            self._next_frame()
        return self._frame

    def advance(self, count: int) -> None:
        """Take note that ``count`` bytes of ``chunks`` were written."""
        frame = self._frame
        while frame and count >= len(frame[0]):
            count -= len(frame.pop(0))
        if frame:
            if count:
                frame[0] = frame[0][count:]
        elif self._current is not None:
            self._end_frame(self._current)

    def withdraw(self, message: Outgoing) -> None:
        """Call a message off: its memory is free when this returns."""
        message.future = None
        if message in self._queue:
            self._queue.remove(message)
            self.queued_bytes -= message.description.size + MESSAGE_BYTES
        elif message is self._current:
            if self._frame:
                self._frame = [memoryview(bytes(piece)) for piece in self._frame]
            # Of what waited for its first slot, the receiver has heard nothing.
            if 0 < message.offset < message.description.size:
                self._notes.append(wire.WITHDRAW)
            self._done(message)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """End every wait with the error that ``make_error()`` returns."""
        for message in [self._current, *self._queue]:
            if message is not None and message.future and not message.future.done():
                message.future.set_exception(make_error())
        self._queue.clear()
        self._notes.clear()
        self._frame, self._current, self.queued_bytes = [], None, 0
        self.is_starving = False

    def _done(self, message: Outgoing) -> None:
        self._current = None
        self.is_starving = False
        self.queued_bytes -= message.description.size + MESSAGE_BYTES
        message.owner = None
        if message.future is not None and not message.future.done():
            message.future.set_result(None)

    def _end_frame(self, message: Outgoing) -> None:
        if message.offset >= message.description.size:
            self._done(message)

    def _next_frame(self) -> None:
        if self._notes:
            self._frame = [memoryview(self._header(self._notes.popleft()))]
            self._sequence += 1
            return
        if self._current is None:
            if not self._queue:
                return
            self._current = self._queue.popleft()
        self._frame = self._fragment_of(self._current)

    def _header(self, kind: int, slot: int = 0) -> bytes:
        header = Header(
            kind, wire.LAST, 0, 0, slot, self._nonce, self._sequence, 0, 0, 0, 0, 0, 0
        )
        return wire.encode(header)

    def _fragment_of(self, message: Outgoing) -> list[memoryview]:
        begin, number = message.offset, message.fragment
        ring = self.ring
        if ring is None or message.description.size < SHARED_BYTES:
            payload = message.memory[begin : begin + FRAGMENT_BYTES]
            head = self.frame_header(message.description, begin, number, payload)
            pieces = [memoryview(head), payload] if len(payload) else [memoryview(head)]
        else:
            self.is_starving = not (ring.has_room or ring.want())
            if self.is_starving:
                return []
            payload = message.memory[begin : begin + SLOT_BYTES]
            slot = ring.fill(payload)
            self.shared_bytes = len(payload)
            head = self.frame_header(message.description, begin, number, payload, slot)
            pieces = [memoryview(head)]
        message.offset += len(payload)
        message.fragment += 1
        return pieces

    def frame_header(
        self,
        description: Description,
        begin: int,
        fragment: int,
        payload: memoryview,
        slot: int | None = None,
    ) -> bytes:
        """Return the header of a message's next frame, and count the frame."""
        kind, dtype, shape, size, tag, label = description
        if fragment:
            shape = ()
        count = len(payload)
        flags = wire.LAST if begin + count >= size else 0
        if slot is not None:
            flags |= wire.SHARED
        total = 0
        if self._is_summed and count:
            flags |= wire.SUMMED
            total = zlib.crc32(payload)
        header = Header(
            kind,
            flags,
            dtype,
            len(shape),
            slot or 0,
            self._nonce,
            self._sequence,
            tag,
            fragment,
            count,
            size,
            label,
            total,
        )
        self._sequence += 1
        return wire.encode(header, shape)

    def resume(self, message: Outgoing, head: bytes, written: int) -> None:
        """Go on with a message of one frame whose first bytes were written already."""
        message.offset = message.description.size
        message.fragment = 1
        self._current = message
        self.queued_bytes += message.description.size + MESSAGE_BYTES
        self._frame = [memoryview(head)]
        if message.description.size:
            self._frame.append(message.memory)
        self.advance(written)
