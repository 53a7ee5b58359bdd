"""A lane: one connection that carries the messages of two members.

Its reader stays registered, so that a closed connection is noticed even if no operation
waits. A failed lane declares no member lost: operations wait until the control link has
named the lost member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from multiworld.backends.arrivals import Description
from multiworld.backends.base import ErrorMaker
from multiworld.backends.channel import TURN_MESSAGES
from multiworld.backends.direct.inbound import Inbound
from multiworld.backends.direct.lane_memory import LaneMemory
from multiworld.backends.direct.lane_socket import LaneSocket
from multiworld.backends.direct.outbound import SHARED_BYTES, Outbound, Outgoing
from multiworld.backends.header import FRAGMENT_BYTES, HeaderError
from multiworld.backends.mailbox import Mailbox
from multiworld.backends.offload import in_thread
from multiworld.config import WorldConfig
from multiworld.net.streams import Stream

# Bytes that a lane may move before the loop's other tasks run.
TURN_BYTES = FRAGMENT_BYTES

# This many bytes copied to shared memory count as one byte written to the socket. So a
# lane may fill the whole ring, in well under a millisecond, before it yields.
SHARED_IS_FASTER = 16
# Bytes of a large payload to wait for before TCP wakes the reader.
LOW_WATER_BYTES = 256 * 1024
# Maximum iterations of the event loop for which a message is held for a receive.
HOLD_TURNS = 4
# Maximum bytes to read from the kernel when a world breaks.
TAKE_IN_BYTES = 16 * 1024 * 1024


class LaneOwner(Protocol):
    """The owner of a lane, which is notified when the lane ends."""

    def lane_ended(self, rank: int, evidence: str) -> None:
        """Handle a connection that ended without a fin."""

    def lane_corrupt(self, rank: int, evidence: str) -> None:
        """Handle bytes that are not a valid frame of this lane."""

    def lane_finished(self, rank: int) -> None:
        """Handle the member's fin, which arrives after all its messages."""


class Lane:
    """A connection to one member; it owns ``sock``. Every frame carries ``nonce``."""

    def __init__(
        self,
        sock: Stream,
        rank: int,
        nonce: int,
        mailbox: Mailbox,
        config: WorldConfig,
        owner: LaneOwner,
    ) -> None:
        self.rank = rank
        self._owner, self._config, self._mailbox = owner, config, mailbox
        self._loop = asyncio.get_running_loop()
        self._outbound = Outbound(nonce, is_summed=config.payload_checksum)
        self._socket = LaneSocket(sock, self._on_readable, self._flush, self.poll)
        self._memory = LaneMemory(
            self._socket,
            self._outbound,
            config.shared_memory_bytes,
            self._flush,
            self._may_send,
        )
        self._inbound = Inbound(
            rank,
            nonce,
            mailbox,
            max_message_bytes=config.max_message_bytes,
            on_fin=self._on_fin,
            shared=self._memory if self._memory.is_usable else None,
        )
        self._drained: asyncio.Future[None] | None = None
        self._is_dead = False  # the connection ended, so nothing more can arrive
        self._is_paused = False
        # This side's fin is queued, and what still arrives is dropped.
        self._is_leaving = False
        # Makes the error of further sends; None: sending is allowed.
        self._refusal: ErrorMaker | None = None
        self._closed = self._loop.create_future()
        self._messages = self._bytes = 0
        self._is_holding = False
        self._socket.read_on()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_finished(self) -> bool:
        return self._inbound.is_finished

    # Sending.

    async def send(
        self, description: Description, memory: memoryview, owner: object
    ) -> None:
        if self._refusal is not None:
            raise self._refusal()
        self._messages += 1
        self._bytes += description.size
        message = self._start(description, memory, owner)
        if message is None:  # all of the message is in the kernel or in the ring
            # Yield only after queueing the message, to keep sends in call order.
            if self._messages >= TURN_MESSAGES or self._bytes >= TURN_BYTES:
                await self.give_way()
            return
        self._messages = self._bytes = 0
        assert message.future is not None
        future = message.future
        try:
            await future
        except asyncio.CancelledError:
            self._outbound.withdraw(message)
            self._flush()
            raise

    async def give_way(self) -> None:
        self._messages = self._bytes = 0
        await asyncio.sleep(0)

    def _start(
        self, description: Description, memory: memoryview, owner: object
    ) -> Outgoing | None:
        """Write what the socket takes; return the message if it must be awaited."""
        outbound, size = self._outbound, description.size
        if size >= SHARED_BYTES and outbound.is_idle:
            self._memory.share()
            if outbound.is_idle:
                self._memory.lend(size)
        is_large = size > FRAGMENT_BYTES or (
            outbound.ring is not None and size >= SHARED_BYTES
        )
        if is_large or self._socket.is_mute or not outbound.is_idle:
            message = self._outgoing(description, memory, owner)
            outbound.put(message)
            if not self._socket.is_writing:
                self._flush()
        else:
            head = outbound.frame_header(description, 0, 0, memory)
            written = self._socket.write([head, memory] if size else [head])
            if written == len(head) + size:
                return None
            message = self._outgoing(description, memory, owner)
            outbound.resume(message, head, written)
            self._socket.write_on()
        future = message.future
        return None if future is None or future.done() else message

    def _outgoing(
        self, description: Description, memory: memoryview, owner: object
    ) -> Outgoing:
        return Outgoing(description, memory, owner, self._loop.create_future())

    def _flush(self) -> None:
        moved = 0
        while self._socket.is_open and not self._socket.is_mute and moved < TURN_BYTES:
            chunks = self._outbound.chunks()
            if not chunks:
                break
            wanted = sum(map(len, chunks))
            written = self._socket.write(chunks)
            self._outbound.advance(written)
            moved += written + self._outbound.shared_bytes // SHARED_IS_FASTER
            self._outbound.shared_bytes = 0
            if written < wanted:
                break
        if self._outbound.is_idle or self._socket.is_mute:
            self._socket.write_off()
            self._wake_drained()
        elif self._outbound.is_starving and not self._outbound.has_frame:
            self._socket.write_off()
            self._memory.look_later()
        else:
            self._socket.write_on()

    def _wake_drained(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _may_send(self) -> bool:
        return self._refusal is None and not self._socket.is_mute

    # Receiving.

    def poll(self) -> None:
        if self._inbound.is_held:
            self._go_on()  # the caller waits for the held message, or for a later one
        elif self._socket.is_reading:
            self._on_readable()

    @property
    def is_held(self) -> bool:
        return self._inbound.is_held

    def held(self, tag: int) -> Description | None:
        return None if self._is_leaving else self._inbound.held(tag)

    def take(self, memory: memoryview) -> None:
        try:
            self._inbound.take(memory)
        except HeaderError as error:
            self._corrupt(error)
            return
        if self._inbound.is_held:
            self._hold()
        elif self._inbound.is_stalled:
            self._stall()
        else:
            self._socket.poll_again()

    def _on_readable(self) -> None:
        if self._is_leaving:
            self._drain()
            return
        if self._inbound.is_held:
            return
        self._read_turn()
        self._socket.wake_at(min(self._inbound.missing_bytes, LOW_WATER_BYTES))

    def _read_turn(self) -> None:
        """Read until nothing is left, or until it is time to yield to other tasks."""
        moved = 0
        while moved < TURN_BYTES and self._socket.is_reading:
            buffers = self._inbound.buffers()
            try:
                count = self._socket.read(buffers, self._memory.keep)
            except (BlockingIOError, InterruptedError):
                self._inbound.release_stage()
                return
            except OSError as error:
                self._end(str(error))
                return
            if count == 0:
                self._end("connection closed by peer")
                return
            # A read that did not fill its first buffer has emptied the socket.
            is_drained = count < len(buffers[0])
            if not self._advance(count) or is_drained:
                return
            moved += count
        self._socket.poll_again()

    def take_in(self) -> None:
        """Read what the kernel holds, which its sender considers sent."""
        if self._is_paused:
            return  # the message being received is being moved to other memory
        self._mailbox.lift_budget()
        moved = 0
        try:
            self._let_go()
            while (
                moved < TAKE_IN_BYTES
                and self._socket.is_open
                and not (self._is_leaving or self._inbound.is_stalled)
                and not self._inbound.is_finished
            ):
                count = self._socket.read(self._inbound.buffers(), self._memory.keep)
                if count == 0:
                    return
                moved += count
                self._inbound.advance(count)
                self._let_go()
        except (BlockingIOError, InterruptedError):
            self._inbound.release_stage()
        except (OSError, HeaderError):
            # The connection ended, or a frame is corrupt: nothing more can be read.
            return

    def _let_go(self) -> None:
        """Put messages that wait for a receive or for room into the mailbox."""
        while self._inbound.is_stalled and not self._is_leaving:
            self._inbound.retry()

    def _drain(self) -> None:
        # A leaving peer may be waiting for free slots of its ring.
        self._inbound.free_memory()
        if not self._socket.drain(TURN_BYTES):
            self._end("connection closed by peer")

    def _advance(self, count: int) -> bool:
        try:
            self._inbound.advance(count)
        except HeaderError as error:
            self._corrupt(error)
            return False
        if self._inbound.is_held:
            self._hold()
            return False
        if self._inbound.is_stalled:
            self._stall()
        return self._socket.is_reading

    def _hold(self) -> None:
        """Wait a few loop iterations for a receive that takes this message."""
        if not self._is_holding:
            self._is_holding = True
            self._loop.call_soon(self._hold_on, HOLD_TURNS)

    def _hold_on(self, turns: int) -> None:
        self._is_holding = False
        if not self._inbound.is_held or not self._socket.is_open or self._is_leaving:
            return
        if turns:
            self._is_holding = True
            self._loop.call_soon(self._hold_on, turns - 1)
        else:
            self._go_on()

    def _go_on(self) -> None:
        """Resume reading after a hold, or once the mailbox has room again."""
        if not self._socket.is_open or self._is_leaving:
            return
        try:
            goes_on = self._inbound.retry()
        except HeaderError as error:
            self._corrupt(error)
            return
        if self._inbound.is_held:
            self._hold()
            self._socket.read_on()
        elif not goes_on:
            self._stall()
        elif not self._inbound.is_finished:
            self._socket.read_on()
            self._socket.poll_again()

    def _stall(self) -> None:
        self._socket.read_off()
        self._mailbox.stall(self.rank, self._go_on)

    def _corrupt(self, error: HeaderError) -> None:
        self._socket.read_off()
        self._is_dead = self._socket.is_mute = True
        self._owner.lane_corrupt(self.rank, str(error))

    def _on_fin(self) -> None:
        self._socket.read_off()
        self._owner.lane_finished(self.rank)

    def _end(self, evidence: str) -> None:
        self._socket.read_off()
        self._is_dead = self._socket.is_mute = True
        if self._is_leaving:
            self.close_nowait()
        elif not self._inbound.is_finished:
            self._socket.write_off()
            self._owner.lane_ended(self.rank, evidence)

    # Closing.

    @property
    def is_dead(self) -> bool:
        return self._is_dead or not self._socket.is_open

    @property
    def is_arriving(self) -> bool:
        return not (self._socket.is_local or self.is_dead or self.is_finished)

    def fail_sends(self, make_error: ErrorMaker) -> None:
        self._refusal = make_error
        self._outbound.fail(make_error)
        self._socket.write_off()
        self._wake_drained()

    def begin_close(self, make_error: ErrorMaker) -> None:
        if self._is_leaving or not self._socket.is_open:
            return
        self._is_leaving = True
        if self._refusal is None and not self._socket.is_mute:
            self._refusal = make_error
            self._outbound.put_fin()
            self._flush()
        if self._socket.is_open and not self._is_dead:
            # The peer may be waiting only for free slots of its ring.
            self._inbound.free_memory()
            self._socket.read_on()

    async def wait_drained(self) -> None:
        while (
            self._socket.is_open
            and not self._socket.is_mute
            and not self._outbound.is_idle
        ):
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            # Shielded, because several callers may wait for it.
            await asyncio.shield(self._drained)

    def finish_close(self, linger_s: float) -> bool:
        is_needed = not self._socket.is_local and self._outbound.is_idle
        if self.is_dead or self._inbound.is_finished or not is_needed:
            self.close_nowait()
            return False
        # Closing TCP with unread bytes sends a reset, which discards the data that the
        # member has not read yet. So let the member close first, if it does in time.
        self._socket.finish_writing()
        self._loop.call_later(linger_s, self.close_nowait)
        return True

    def abort(self, make_error: ErrorMaker) -> None:
        self.fail_sends(make_error)
        self.close_nowait()

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    async def paused(self, call: Callable[[], object]) -> None:
        was_reading = self._socket.is_reading
        self._socket.read_off()
        self._is_paused = True
        try:
            await in_thread(call)
        finally:
            self._is_paused = False
            if was_reading and not self.is_dead:
                self._socket.read_on()

    def close_nowait(self) -> None:
        if not self._socket.is_open:
            return
        self._socket.close()
        self._inbound.close()
        self._memory.close()
        self._wake_drained()
        if not self._closed.done():
            self._closed.set_result(None)
