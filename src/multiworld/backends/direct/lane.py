"""A lane: one connection that carries the messages of two members. Shell.

The reader is always registered with the loop, so that a message, a fin or the end of
the connection is seen whether or not anybody waits; it pauses only while the mailbox
has no room. Writing is tried at once and only what the socket does not take is left to
the loop.

A lane that fails does not judge: it reports, and what waits on it waits on, until the
world has heard from the control link who is to blame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from multiworld.backends.direct.header import FRAGMENT_BYTES, HeaderError
from multiworld.backends.direct.inbound import Inbound
from multiworld.backends.direct.lane_memory import LaneMemory
from multiworld.backends.direct.lane_socket import LaneSocket
from multiworld.backends.direct.outbound import SHARED_BYTES, Outbound, Outgoing
from multiworld.backends.mailbox import MESSAGE_BYTES, Description, Mailbox
from multiworld.backends.offload import in_thread
from multiworld.config import WorldConfig
from multiworld.net.streams import Stream

TURN_MESSAGES = 64
TURN_BYTES = FRAGMENT_BYTES
"""What a lane may move before it gives way to the loop's other tasks."""

SHARED_IS_FASTER = 16
"""How many bytes may be copied to shared memory for each that the kernel would copy:
so a lane gives way after the whole ring, which takes well under a millisecond."""

LOW_WATER_BYTES = 256 * 1024
"""Least of a large payload that it is worth to be woken for over TCP."""

HOLD_TURNS = 4
"""Turns of the loop that a message which nobody has asked for stays in the buffer."""

OUTBOX_BYTES = 4 * 1024 * 1024
"""Most bytes of eager messages that are copied while the socket is full; then even a
small send waits."""

ErrorMaker = Callable[[], Exception]


class LaneOwner(Protocol):
    """Who hears of a lane's end."""

    def lane_ended(self, rank: int, evidence: str) -> None:
        """The connection ended without a fin."""

    def lane_corrupt(self, rank: int, evidence: str) -> None:
        """What arrived was not a frame of this lane."""

    def lane_finished(self, rank: int) -> None:
        """The member's fin arrived, behind all its messages."""


class Lane:
    """A connection to one member."""

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
        self._is_dead = False  # nothing more can arrive: it ended without a fin
        self._is_leaving = False  # our fin is queued: what arrives is dropped
        self._refusal: ErrorMaker | None = None  # why nothing more can be sent
        self._closed = self._loop.create_future()
        self._messages = self._bytes = 0
        self._is_holding = False
        self._socket.read_on()

    def fileno(self) -> int:
        """Return the descriptor, or -1 once closed."""
        return self._socket.fileno()

    @property
    def is_finished(self) -> bool:
        """True once the member's fin has arrived, behind all its messages."""
        return self._inbound.is_finished

    # Sending.

    async def send(
        self, description: Description, memory: memoryview, owner: object
    ) -> None:
        """Send a message; return when ``memory`` may be used again.

        Cancellation: the frame that is being written is finished, the rest withdrawn.
        """
        if self._refusal is not None:
            raise self._refusal()
        self._messages += 1
        self._bytes += description.size
        message = self._start(description, memory, owner)
        if message is None:
            # Only after the message has its place: tasks that send at once stay in
            # the order in which they called.
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
        """Let the loop's other tasks run."""
        self._messages = self._bytes = 0
        await asyncio.sleep(0)

    def _start(
        self, description: Description, memory: memoryview, owner: object
    ) -> Outgoing | None:
        """Hand over what the socket takes; return the message if it must be awaited."""
        outbound, size = self._outbound, description.size
        if size >= SHARED_BYTES and outbound.is_idle:
            self._memory.share()
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
        size = description.size
        is_eager = size <= self._config.eager_bytes
        queued = self._outbound.queued_bytes
        if is_eager and queued + size + MESSAGE_BYTES <= OUTBOX_BYTES:
            return Outgoing(description, memoryview(bytes(memory)), None, None)
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
        """Take what has arrived already, without waiting for the loop."""
        if self._inbound.is_held:
            self._go_on()  # it is what is waited for, or that is behind it
        elif self._socket.is_reading:
            self._on_readable()

    @property
    def is_held(self) -> bool:
        """True while a message has begun to arrive that nobody has asked for."""
        return self._inbound.is_held

    def held(self, tag: int) -> Description | None:
        """Return what the next message is, if it has this tag and all of it is here."""
        return None if self._is_leaving else self._inbound.held(tag)

    def take(self, memory: memoryview) -> None:
        """Copy the message that ``held`` described."""
        try:
            self._inbound.take(memory)
        except HeaderError as error:
            self._corrupt(error)
            return
        if self._inbound.is_held:
            self._hold()
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
        """Read until there is nothing more, or others have to have their turn."""
        moved = 0
        while moved < TURN_BYTES and self._socket.is_reading:
            buffers = self._inbound.buffers()
            try:
                count = self._memory.receive(buffers)
            except (BlockingIOError, InterruptedError):
                self._inbound.give_back()
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

    def _drain(self) -> None:
        """Read and drop: the caller's tensors are no longer ours to write to."""
        self._inbound.free_memory()  # a sender that waits for it may be leaving, too
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
        """Give whoever may want what comes now a few turns of the loop to say so."""
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
        """Go on with the message that was held, or for which there is room now."""
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

    # The end.

    @property
    def is_dead(self) -> bool:
        """True once nothing more can arrive."""
        return self._is_dead or not self._socket.is_open

    def fail_sends(self, make_error: ErrorMaker) -> None:
        """Fail every send, now and from now on; receives go on to the fin."""
        self._refusal = make_error
        self._outbound.fail(make_error)
        self._socket.write_off()
        self._wake_drained()

    def begin_close(self, make_error: ErrorMaker) -> None:
        """Queue the fin behind all that was sent; refuse what comes after it."""
        if self._is_leaving or not self._socket.is_open:
            return
        self._is_leaving = True
        if self._refusal is None and not self._socket.is_mute:
            self._refusal = make_error
            self._outbound.put_fin()
            self._flush()
        if self._socket.is_open and not self._is_dead:
            self._socket.read_on()

    async def wait_drained(self) -> None:
        """Wait until everything, the fin included, was handed to the kernel.

        Cancellation: safe.
        """
        while (
            self._socket.is_open
            and not self._socket.is_mute
            and not self._outbound.is_idle
        ):
            self._drained = self._loop.create_future()
            await self._drained

    def finish_close(self, linger_s: float) -> bool:
        """Close; True if the connection must stay for a while, to be closed later.

        A TCP socket closed with unread bytes sends a reset, and a reset takes away
        what the member has not read. So it stays until the member hangs up, or for
        ``linger_s`` at most. A Unix socket needs none of that.
        """
        is_needed = not self._socket.is_local and self._outbound.is_idle
        if self.is_dead or self._inbound.is_finished or not is_needed:
            self.close_nowait()
            return False
        self._socket.finish_writing()
        self._loop.call_later(linger_s, self.close_nowait)
        return True

    def abort(self, make_error: ErrorMaker) -> None:
        """Fail every send and hang up at once."""
        self.fail_sends(make_error)
        self.close_nowait()

    async def wait_closed(self) -> None:
        """Wait until the connection is closed; see ``finish_close``.

        Cancellation: safe.
        """
        await asyncio.shield(self._closed)

    async def paused(self, call: Callable[[], object]) -> None:
        """Run ``call`` in a thread; what arrives meanwhile stays in the kernel.

        Cancellation: waits for the thread.
        """
        was_reading = self._socket.is_reading
        self._socket.read_off()
        try:
            await in_thread(call)
        finally:
            if was_reading and not self.is_dead:
                self._socket.read_on()

    def close_nowait(self) -> None:
        """Hang up; safe to repeat."""
        if not self._socket.is_open:
            return
        self._socket.close()
        self._inbound.close()
        self._memory.close()
        self._wake_drained()
        if not self._closed.done():
            self._closed.set_result(None)
