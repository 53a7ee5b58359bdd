"""The shared memory of a lane: a ring to send through, a window onto the peer's ring,
and lent blocks. The socket carries the descriptor of each once, then the headers, and a
bell when slots are free for which the sender waits."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable

from multiworld.backends import header as wire
from multiworld.backends.direct import shared_memory
from multiworld.backends.direct.lane_socket import LaneSocket
from multiworld.backends.direct.lending import Block, Borrowed, Lender
from multiworld.backends.direct.outbound import Outbound
from multiworld.backends.header import HeaderError

# Seconds between polls for a free slot while reading pauses and no bell can arrive: the
# first interval, and the maximum. The interval doubles with each poll.
LOOK_S, LOOK_MAX_S = 0.002, 0.032

# Maximum number of descriptors whose frames have not been parsed. One read takes one
# descriptor, and only the previous descriptor's frame can still be incomplete.
MAX_DESCRIPTORS = 8


class LaneMemory:
    """The shared-memory half of a lane."""

    def __init__(
        self,
        connection: LaneSocket,
        outbound: Outbound,
        ring_bytes: int,
        flush: Callable[[], None],
        may_send: Callable[[], bool],
    ) -> None:
        self._connection, self._outbound = connection, outbound
        self._flush, self._may_send = flush, may_send
        # Accept the peer's shared memory even if this side sends none.
        self.is_usable = shared_memory.is_usable(connection.sock)
        self._slots = shared_memory.slots_in(ring_bytes) if self.is_usable else 0
        # Descriptors that have arrived and are not mapped yet.
        self._descriptors: deque[int] = deque()
        self.keep = self._keep if self.is_usable else None  # see ``LaneSocket.read``
        self._looking: asyncio.TimerHandle | None = None
        self._look_s = LOOK_S
        self._loop = asyncio.get_running_loop()

    # Sending.

    def share(self) -> None:
        """Make a ring and pass it on; without one, the socket carries everything."""
        if not self._slots:
            return
        slots, self._slots = self._slots, 0
        try:
            ring = shared_memory.Ring(slots)
        except OSError:
            return
        if not self._pass_on(self._outbound.header(wire.MEMORY, slots), ring.fd):
            self._slots = slots  # the next message tries again
            ring.close()
            return
        ring.close_fd()
        self._outbound.ring = ring
        self._outbound.lender = Lender(self._announce)

    def lend(self, size: int) -> None:
        """Make a block for a message if none is free; nothing else may be unsent."""
        if self._outbound.lender is not None:
            self._outbound.lender.provide(size)

    def _announce(self, block: Block) -> bool:
        head = self._outbound.header(wire.LEND, block.number, block.size)
        return self._pass_on(head, block.fd)

    def _pass_on(self, head: bytes, fd: int) -> bool:
        """Send a frame with a descriptor; return False if the socket takes neither."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))
        sock = self._connection.sock
        try:
            written = sock.sendmsg([head], [rights])  # type: ignore[call-arg]
        except OSError:  # the socket is full or closed
            return False
        self._outbound.announced(head, written)
        if not self._outbound.is_idle:
            self._connection.write_on()
        return True

    def look_later(self) -> None:
        """Poll for a free slot: no bell can arrive while reading pauses."""
        if self._looking is None:
            self._looking = self._loop.call_later(self._look_s, self._look)

    def _look(self) -> None:
        self._stop_looking()
        if not (self._outbound.is_starving and self._connection.is_open):
            self._look_s = LOOK_S
            return
        frames = self._outbound.frames
        self._look_s = min(2 * self._look_s, LOOK_MAX_S)
        self._flush()
        if self._outbound.frames != frames:
            # A frame was sent, so the receiver is freeing slots.
            self._look_s = LOOK_S
            if self._looking is not None:
                self._stop_looking()
                self.look_later()

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    # Receiving.

    def _keep(self, data: bytes) -> None:
        """Keep the descriptors that a read has found, until their frames are parsed."""
        for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4]):
            if len(self._descriptors) >= MAX_DESCRIPTORS:
                os.close(fd)  # more descriptors than the frames can have announced
            else:
                self._descriptors.append(fd)

    # Receiving. These methods raise ``HeaderError`` if the announced memory has not
    # arrived, or differs from its announcement.

    def open_window(self, slots: int) -> shared_memory.Window:
        """Map the shared memory whose descriptor has arrived."""
        if not self._descriptors:
            raise HeaderError(
                "the frame announces shared memory, but no descriptor arrived with it"
            )
        return shared_memory.Window(self._descriptors.popleft(), slots)

    def open_block(self, size: int) -> Borrowed:
        """Map the lent block whose descriptor has arrived."""
        if not self._descriptors:
            raise HeaderError(
                "the frame lends memory, but no descriptor arrived with it"
            )
        return Borrowed(self._descriptors.popleft(), size)

    def ring_bell(self) -> None:
        """Notify the waiting peer that a slot of its ring is free."""
        if self._may_send():
            self._outbound.put_bell()
            if not self._connection.is_writing:
                self._loop.call_soon(self._flush)

    def on_bell(self) -> None:
        """Handle the peer's message that a slot of our ring is free."""
        self._loop.call_soon(self._look)

    def close(self) -> None:
        if self._outbound.ring is not None:
            self._outbound.ring.close()
            self._outbound.ring = None
        if self._outbound.lender is not None:
            self._outbound.lender.close()
            self._outbound.lender = None
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._stop_looking()
