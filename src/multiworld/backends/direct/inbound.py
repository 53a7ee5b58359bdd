"""The receiving half of a lane, which parses bytes into messages; it does no I/O.

The lane reads into the memory that ``buffers`` returns, and then calls ``advance``. For
a large payload, this memory is the tensor itself. While ``is_stalled`` is true, the
lane must not read.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable

from multiworld.backends import header as wire
from multiworld.backends.arrivals import Arrival, Description
from multiworld.backends.direct.lane_memory import LaneMemory
from multiworld.backends.direct.lending import MAX_BLOCKS, Borrowed
from multiworld.backends.direct.shared_memory import SLOT_BYTES, Window
from multiworld.backends.dtypes import SIZES, UINT8
from multiworld.backends.header import Header, HeaderError
from multiworld.backends.mailbox import Mailbox

logger = logging.getLogger("multiworld")

STAGE_BYTES = 128 * 1024

# Bytes to read beyond a large payload: enough for the next header, but little more,
# because the part of the next payload that is read here is copied twice.
AHEAD_BYTES = wire.SIZE + 8 * 8
# Torch's limit on the product of a tensor's nonzero dimensions.
MAX_ELEMENTS = 2**63 - 1
LARGE_BYTES = 32 * 1024  # payload size from which a copy costs more than a system call

_NOTHING = memoryview(b"")
# Staging buffers that no lane uses now: a lane keeps one only while it has unparsed
# bytes, so that idle worlds need none.
_IDLE: list[memoryview] = []
MAX_IDLE = 16  # maximum number of idle staging buffers in a process


def _idle_stage() -> memoryview:
    try:
        # Checking first would race with the event loops of other threads.
        return _IDLE.pop()
    except IndexError:
        return memoryview(bytearray(STAGE_BYTES))


class Inbound:
    """Parser of one lane's incoming bytes; a ``HeaderError`` ends the lane."""

    def __init__(
        self,
        source: int,
        nonce: int,
        mailbox: Mailbox,
        *,
        max_message_bytes: int,
        on_fin: Callable[[], None],
        shared: LaneMemory | None = None,
    ) -> None:
        self._source, self._nonce, self._mailbox = source, nonce, mailbox
        self._max_message_bytes = max_message_bytes
        self._on_fin, self._shared = on_fin, shared
        self._window: Window | None = None
        self._blocks: dict[int, Borrowed] = {}
        self._stage = _NOTHING
        self._start = self._end = 0
        self._sequence = 0
        self._arrival: Arrival | None = None
        self._header: Header | None = None
        self._fragment = 0
        self._missing = 0
        self._sum = 0
        self._pending: tuple[Header, Description] | None = None
        self.is_finished = False
        # A message without a posted receive is held at its header: programs usually
        # post the receive within an iteration or two of the loop, and the message is
        # then copied only once.
        self.is_held = False

    @property
    def is_stalled(self) -> bool:
        """True while a message is held, or waits for room in the mailbox."""
        return self._pending is not None

    @property
    def missing_bytes(self) -> int:
        return self._missing

    def close(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()
        self._blocks.clear()  # each is unmapped when its last tensor is freed
        self._stage, self._start, self._end = _NOTHING, 0, 0
        self._pending, self.is_held = None, False

    def free_memory(self) -> None:
        """Free all slots of shared memory unread; for a lane that is closing."""
        if self._window is not None:
            self._window.free_all()

    def buffers(self) -> list[memoryview]:
        """Return the buffers to read the next bytes into, in order; none is empty."""
        if self._stage is _NOTHING:
            self._stage = _idle_stage()
        if self._start == self._end:
            self._start = self._end = 0
            if self._missing and self._arrival is not None:
                begin = self._arrival.received
                payload = self._arrival.memory[begin : begin + self._missing]
                ahead = AHEAD_BYTES if self._missing >= LARGE_BYTES else STAGE_BYTES
                return [payload, self._stage[:ahead]]
        elif STAGE_BYTES - self._end < wire.SIZE + 8 * wire.MAX_NDIM:
            self._compact()
        return [self._stage[self._end :]]

    def _compact(self) -> None:
        kept = bytes(self._stage[self._start : self._end])
        self._stage[: len(kept)] = kept
        self._start, self._end = 0, len(kept)

    def advance(self, count: int) -> None:
        """Parse ``count`` bytes that were read into ``buffers``."""
        if self._missing and self._start == self._end:
            straight = min(count, self._missing)
            assert self._arrival is not None
            begin = self._arrival.received
            self._accept_payload(self._arrival.memory[begin : begin + straight])
            count -= straight
        self._end += count
        self._parse()
        self.release_stage()

    def release_stage(self) -> None:
        """Return the staging buffer to the process's pool if it is empty."""
        if self._start == self._end and self._stage is not _NOTHING:
            if len(_IDLE) < MAX_IDLE:
                _IDLE.append(self._stage)
            self._stage = _NOTHING
            self._start = self._end = 0

    def held(self, tag: int) -> Description | None:
        if not self.is_held or self._pending is None:
            return None
        header, description = self._pending
        if (
            description.tag != tag
            or header.flags != wire.LAST
            or header.payload != description.size
            or header.payload > self._end - self._start
        ):
            return None
        return description

    def take(self, memory: memoryview) -> None:
        begin, count = self._start, len(memory)
        memory[:] = self._stage[begin : begin + count]
        self._start += count
        self._pending, self.is_held = None, False
        self._parse()
        self.release_stage()

    def retry(self) -> bool:
        """Retry delivering the pending message; return whether the lane may read on."""
        if self._pending is not None:
            header, description = self._pending
            self._pending, self.is_held = None, False
            if self._begin(header, description):
                self._parse()
                self.release_stage()
        return not self.is_stalled

    def _parse(self) -> None:
        while not self.is_finished:
            if self._missing:
                self._unstage()
                if self._missing:
                    return
            elif not self._next_header():
                return

    def _unstage(self) -> None:
        count = min(self._missing, self._end - self._start)
        arrival = self._arrival
        if count and arrival is not None:
            begin = arrival.received
            staged = self._stage[self._start : self._start + count]
            arrival.memory[begin : begin + count] = staged
            self._start += count
            self._accept_payload(staged)

    def _accept_payload(self, payload: memoryview) -> None:
        """Count payload bytes that lie in the message's memory now."""
        self._update_checksum(payload)
        self._count(len(payload))

    def _update_checksum(self, payload: memoryview) -> None:
        if self._header is not None and self._header.flags & wire.SUMMED:
            self._sum = zlib.crc32(payload, self._sum)

    def _count(self, count: int) -> None:
        arrival, header = self._arrival, self._header
        assert arrival is not None
        assert header is not None
        arrival.received += count
        self._missing -= count
        if not self._missing:
            self._end_frame(header, arrival)

    def _end_frame(self, header: Header, arrival: Arrival) -> None:
        if header.flags & wire.SUMMED and self._sum != header.payload_sum:
            raise HeaderError("a payload's checksum is wrong")
        self._fragment += 1
        if header.flags & wire.LAST:
            if arrival.received != arrival.description.size:
                raise HeaderError(
                    f"a message of {arrival.description.size} bytes ended after "
                    f"{arrival.received} bytes"
                )
            self._arrival = None
            self._mailbox.finish(arrival)

    def _next_header(self) -> bool:
        decoded = wire.decode(self._stage, self._start, self._end)
        if decoded is None:
            return False
        header, shape = decoded
        self._start += wire.SIZE + 8 * header.ndim
        self._check(header)
        self._sequence += 1
        return self._dispatch(header, shape)

    def _check(self, header: Header) -> None:
        if header.nonce != self._nonce:
            raise HeaderError("the frame belongs to another incarnation of the world")
        if header.sequence != self._sequence:
            raise HeaderError(
                f"frame {header.sequence} arrived instead of frame {self._sequence}"
            )
        is_shared = header.flags & (wire.SHARED | wire.LENT)
        limit = SLOT_BYTES if is_shared else wire.FRAGMENT_BYTES
        if header.payload > limit or header.kind > wire.LEND:
            raise HeaderError(f"the header has invalid fields: {header}")

    def _dispatch(self, header: Header, shape: tuple[int, ...]) -> bool:
        if header.kind >= wire.MEMORY:
            self._handle_memory_frame(header)
            return True
        if header.kind == wire.FIN:
            if self._arrival is not None:
                raise HeaderError("a fin arrived in the middle of a message")
            self.is_finished = True
            self._on_fin()
            return False
        if header.kind == wire.WITHDRAW:
            if self._arrival is None:
                raise HeaderError("a withdrawal arrived, but no message is open")
            arrival, self._arrival = self._arrival, None
            if self._header is not None:
                self._free_block(self._header, arrival)
            self._mailbox.revoke(arrival)
            return True
        if header.fragment:
            self._continue(header)
            return True
        if self._arrival is not None:
            raise HeaderError("a message started inside another one")
        description = self._describe(header, shape)
        if header.flags == wire.LAST and self._let_peek(header.payload, description):
            return True
        if not self._mailbox.is_wanted(self._source, description.tag):
            self._pending, self.is_held = (header, description), True
            return False
        return self._begin(header, description)

    def _let_peek(self, count: int, description: Description) -> bool:
        """Pass a complete message to ``peek`` in place; return False if impossible."""
        begin, end = self._start, self._start + count
        if count != description.size or end > self._end:
            return False
        peek = self._mailbox.peek_of(self._source, description)
        if peek is None:
            return False
        self._start = end
        try:
            peek(self._stage[begin:end])
        except Exception:
            logger.exception("the peek function raised an error; it must not raise")
        return True

    def _handle_memory_frame(self, header: Header) -> None:
        if self._shared is None:
            raise HeaderError(
                "a shared memory frame arrived on a lane without shared memory"
            )
        if header.kind == wire.BELL:
            self._shared.on_bell()
        elif header.kind == wire.LEND:
            if header.slot >= MAX_BLOCKS:
                raise HeaderError(
                    f"block number {header.slot} exceeds the maximum, {MAX_BLOCKS - 1}"
                )
            self._blocks[header.slot] = self._shared.open_block(header.size)
        elif self._window is not None:
            raise HeaderError("the peer announced shared memory twice")
        else:
            self._window = self._shared.open_window(header.slot)

    def _describe(self, header: Header, shape: tuple[int, ...]) -> Description:
        if header.size > self._max_message_bytes:
            raise HeaderError(
                f"a message announces {header.size} bytes, over max_message_bytes"
            )
        if header.dtype not in SIZES:
            raise HeaderError(f"dtype code {header.dtype} is unknown in this version")
        if header.kind == wire.TENSOR:
            if math.prod(shape) * SIZES[header.dtype] != header.size:
                raise HeaderError(f"shape {shape} does not fit {header.size} bytes")
        elif header.kind != wire.COLLECTIVE and header.dtype != UINT8:
            raise HeaderError("a bundle or an object has a dtype other than uint8")
        elif header.kind != wire.COLLECTIVE and shape:
            raise HeaderError(
                "a bundle or object frame has a shape; only tensors may have one"
            )
        if not header.size and math.prod(filter(None, shape)) > MAX_ELEMENTS:
            raise HeaderError(f"no tensor can have shape {shape}")
        if header.kind == wire.BUNDLE and header.label > header.size:
            raise HeaderError("a bundle's manifest is larger than the bundle")
        return Description(
            header.kind, header.dtype, shape, header.size, header.tag, header.label
        )

    def _begin(self, header: Header, description: Description) -> bool:
        lent = None
        if header.flags & wire.LENT:
            if not description.size:
                raise HeaderError("an empty message lies in lent memory")
            lent = self._block(header, description.size).tensor
        try:
            arrival = self._mailbox.begin(self._source, description, lent)
        except (MemoryError, RuntimeError, TypeError, ValueError) as error:
            size = description.size
            raise HeaderError(
                f"no memory for a message of {size} bytes: {error}"
            ) from error
        if arrival is None:
            self._pending = header, description
            return False
        self._arrival, self._fragment = arrival, 0
        self._open_frame(header, arrival)
        return True

    def _continue(self, header: Header) -> None:
        if self._arrival is None or header.fragment != self._fragment:
            raise HeaderError(
                f"fragment {header.fragment} arrived instead of fragment "
                f"{self._fragment}"
            )
        self._open_frame(header, self._arrival)

    def _open_frame(self, header: Header, arrival: Arrival) -> None:
        if arrival.received + header.payload > arrival.description.size:
            raise HeaderError("a message is longer than its header announced")
        count = header.payload
        self._header, self._missing, self._sum = header, count, 0
        if header.flags == wire.LAST and count <= self._end - self._start:
            # Fast path for messages that have arrived completely: most small ones.
            begin, start = arrival.received, self._start
            arrival.memory[begin : begin + count] = self._stage[start : start + count]
            self._start += count
            arrival.received += count
            self._missing = 0
            self._end_frame(header, arrival)
        elif header.flags & wire.SHARED:
            self._take_shared(header, arrival)
        elif header.flags & wire.LENT:
            self._take_lent(header, arrival)
        elif not header.payload:
            self._end_frame(header, arrival)

    def _take_shared(self, header: Header, arrival: Arrival) -> None:
        if self._window is None or self._shared is None:
            raise HeaderError("the frame refers to shared memory that does not exist")
        self._take(arrival, self._window.payload(header.slot, header.payload))
        if self._window.free(header.slot):
            self._shared.ring_bell()
        self._count(header.payload)

    def _take(self, arrival: Arrival, payload: memoryview) -> None:
        """Merge or copy a payload from memory of the sender, unless it is lent."""
        begin = arrival.received
        try:
            self._update_checksum(payload)
            if arrival.merge is not None:
                _merge(arrival, begin, payload)
            elif not arrival.is_lent:
                arrival.memory[begin : begin + len(payload)] = payload
        finally:
            payload.release()

    def _block(self, header: Header, size: int) -> Borrowed:
        block = self._blocks.get(header.slot)
        if block is None or size > block.size:
            raise HeaderError(
                f"lent block {header.slot} is unknown or smaller than {size} bytes"
            )
        return block

    def _take_lent(self, header: Header, arrival: Arrival) -> None:
        block = self._block(header, arrival.description.size)
        self._take(arrival, block.part(arrival.received, header.payload))
        if header.flags & wire.LAST:
            self._free_block(header, arrival)
        self._count(header.payload)

    def _free_block(self, header: Header, arrival: Arrival) -> None:
        """Free the block of a message that was copied or withdrawn."""
        # A lent tensor frees its block itself.
        if header.flags & wire.LENT and not arrival.is_lent:
            self._block(header, 0).free()


def _merge(arrival: Arrival, begin: int, payload: memoryview) -> None:
    assert arrival.merge is not None
    try:
        arrival.merge(begin, payload)
    except Exception as error:  # the lane cannot skip the part that failed
        raise HeaderError(f"a payload cannot be reduced: {error}") from error
    arrival.is_merged = True
