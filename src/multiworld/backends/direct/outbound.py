"""The sending half of a lane, which turns messages into bytes; it does no I/O.

The lane writes the pieces that ``chunks`` returns, and calls ``advance``. A message can
be withdrawn at any byte: its frame is finished from a copy, and a withdrawal follows.
"""

from __future__ import annotations

import zlib
from asyncio import Future
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from multiworld.backends import header as wire
from multiworld.backends.arrivals import Description
from multiworld.backends.direct.lending import Block, Lender
from multiworld.backends.direct.shared_memory import SLOT_BYTES, Ring
from multiworld.backends.header import FRAGMENT_BYTES, Header

# Minimum bytes of a message that goes through shared memory: from this size on, two
# copies in user space and a wake-up cost less than the kernel's two copies.
SHARED_BYTES = 128 * 1024


@dataclass(slots=True, eq=False)
class Outgoing:
    """A message in the send queue."""

    description: Description
    memory: memoryview
    owner: object  # keeps ``memory`` alive
    # Done once the caller may reuse ``memory``; None: nobody waits.
    future: Future[None] | None
    offset: int = 0
    fragment: int = 0
    block: Block | None = None


class Outbound:
    """Send queue of one lane; ``is_summed`` adds a CRC-32 of every payload."""

    def __init__(self, nonce: int, *, is_summed: bool) -> None:
        self._nonce, self._is_summed = nonce, is_summed
        self.ring: Ring | None = None
        self.lender: Lender | None = None
        self.is_starving = False  # a fragment waits for a free slot of the ring
        self.shared_bytes = 0  # bytes that the last frame copied to the ring
        self._sequence = 0
        self._queue: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._frame: list[memoryview] = []
        self._control_frames: deque[int] = deque()

    @property
    def frames(self) -> int:
        """Number of frames so far."""
        return self._sequence

    @property
    def is_idle(self) -> bool:
        return not (self._frame or self._current or self._queue or self._control_frames)

    @property
    def has_frame(self) -> bool:
        """True while the current frame has unwritten bytes."""
        return bool(self._frame)

    def put(self, message: Outgoing) -> None:
        self._queue.append(message)

    def put_bell(self) -> None:
        """Queue a bell, which signals a free slot to the peer, as the next frame."""
        if wire.BELL not in self._control_frames:
            self._control_frames.append(wire.BELL)

    def header(self, kind: int, slot: int = 0, size: int = 0) -> bytes:
        """Return the header of a frame without a message; the caller counts it."""
        nonce, sequence = self._nonce, self._sequence
        header = Header(
            kind, wire.LAST, 0, 0, slot, nonce, sequence, 0, 0, 0, size, 0, 0
        )
        return wire.encode(header)

    def announced(self, head: bytes, written: int) -> None:
        """Count an announcement; queue the bytes after its first ``written`` bytes."""
        self._sequence += 1
        self._frame = [memoryview(head)]
        self.advance(written)

    def put_fin(self) -> None:
        """Append the fin, the lane's last frame."""
        fin = Description(wire.FIN, 0, (), 0, 0, 0)
        self.put(Outgoing(fin, memoryview(b""), None, None))

    def chunks(self) -> list[memoryview]:
        """Return the unwritten pieces of one frame; none if idle or ``is_starving``."""
        if not self._frame:
            self._next_frame()
        return self._frame

    def advance(self, count: int) -> None:
        """Drop the first ``count`` bytes of ``chunks``: they have been written."""
        frame = self._frame
        while frame and count >= len(frame[0]):
            count -= len(frame.pop(0))
        if frame:
            if count:
                frame[0] = frame[0][count:]
        elif self._current is not None:
            self._end_frame(self._current)

    def withdraw(self, message: Outgoing) -> None:
        """Withdraw a message; its memory may be reused when this returns."""
        message.future = None
        if message in self._queue:
            self._queue.remove(message)
        elif message is self._current:
            if self._frame:
                self._frame = [memoryview(bytes(piece)) for piece in self._frame]
            # A message with no frame sent yet is unknown to the receiver, and needs no
            # withdrawal frame.
            if 0 < message.offset < message.description.size:
                self._control_frames.append(wire.WITHDRAW)
            self._done(message)

    def fail(self, make_error: Callable[[], Exception]) -> None:
        """Drop the queue; every waiting send raises the error ``make_error()``."""
        for message in [self._current, *self._queue]:
            if message is not None and message.future and not message.future.done():
                message.future.set_exception(make_error())
        self._queue.clear()
        self._control_frames.clear()
        self._frame, self._current = [], None
        self.is_starving = False

    def _done(self, message: Outgoing) -> None:
        self._current = None
        self.is_starving = False
        message.owner = None
        if message.future is not None and not message.future.done():
            message.future.set_result(None)

    def _end_frame(self, message: Outgoing) -> None:
        if message.offset >= message.description.size:
            self._done(message)

    def _next_frame(self) -> None:
        if self._control_frames:
            self._frame = [memoryview(self.header(self._control_frames.popleft()))]
            self._sequence += 1
            return
        if self._current is None:
            if not self._queue:
                return
            self._current = self._queue.popleft()
        self._frame = self._fragment_of(self._current)

    def _fragment_of(self, message: Outgoing) -> list[memoryview]:
        begin, number = message.offset, message.fragment
        ring = self.ring
        if not begin and self.lender is not None:
            message.block = self.lender.take(message.description.size)
        if message.block is not None:
            payload = message.memory[begin : begin + SLOT_BYTES]
            message.block.write(begin, payload)
            self.shared_bytes = len(payload)
            slot = message.block.number
            head = self.frame_header(
                message.description, begin, number, payload, slot, wire.LENT
            )
            pieces = [memoryview(head)]
        elif ring is None or message.description.size < SHARED_BYTES:
            payload = message.memory[begin : begin + FRAGMENT_BYTES]
            head = self.frame_header(message.description, begin, number, payload)
            pieces = [memoryview(head), payload] if len(payload) else [memoryview(head)]
        else:
            self.is_starving = not (ring.has_room or ring.request_bell())
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
        begin: int,  # offset of the payload in the message, in bytes
        fragment: int,
        payload: memoryview,
        # Slot or block with the payload; None: the socket carries it.
        slot: int | None = None,
        where: int = wire.SHARED,
    ) -> bytes:
        """Return the header of a message's next frame, and count the frame."""
        kind, dtype, shape, size, tag, label = description
        if fragment:
            shape = ()
        count = len(payload)
        flags = wire.LAST if begin + count >= size else 0
        if slot is not None:
            flags |= where
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
        head = wire.encode(header, shape)
        self._sequence += 1
        return head

    def resume(self, message: Outgoing, head: bytes, written: int) -> None:
        """Continue a one-frame message whose first ``written`` bytes are sent."""
        message.offset = message.description.size
        message.fragment = 1
        self._current = message
        self._frame = [memoryview(head)]
        if message.description.size:
            self._frame.append(message.memory)
        self.advance(written)
