"""A non-blocking connection between keeper and gateway, for frames and descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from multiworld.serve.keeper.frames import Entry, FrameError, FrameReader

READ_BYTES = 256 * 1024
ANCILLARY_BYTES = socket.CMSG_LEN(16 * 4)  # for up to 16 descriptors in one read
BUFFER_BYTES = 1024 * 1024  # send buffer to request; the kernel may allow less


def add_socket(number: int, known: list[socket.socket]) -> socket.socket | None:
    """Add a descriptor's socket to ``known``, and return it.

    If ``known`` has that socket already, close the descriptor, and return None.
    """
    sock = socket.socket(fileno=number)
    if any(os.path.sameopenfile(number, each.fileno()) for each in known):
        sock.close()
        return None
    known.append(sock)
    return sock


class Channel:
    """One end of the connection."""

    def __init__(
        self,
        sock: socket.socket,  # a connected Unix stream socket, which the channel closes
        # Called with each frame and the queue of descriptors received so far; removes
        # this frame's descriptors from the front.
        on_frame: Callable[[list[Entry], deque[int]], None],
        # Called once, when the peer is gone or speaks another protocol.
        on_lost: Callable[[], None],
        # Seconds to pause after a small read, so that the next read gets many frames;
        # the socket buffers them during the pause.
        rest_s: float = 0.0,
    ) -> None:
        self._rest_s = rest_s
        self._sock, self._on_frame, self._on_lost = sock, on_frame, on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader()
        # Allocated once: a new buffer for each read would fault in new pages.
        self._read = memoryview(bytearray(READ_BYTES))
        self._descriptors: deque[int] = deque()
        # Each entry: bytes to send, descriptors to send with the first byte, and the
        # callback to call once all bytes are sent.
        self._queue: deque[tuple[memoryview, tuple[int, ...], Callable[[], None]]]
        self._queue = deque()
        self._is_open = True
        self._has_failed = False  # a send has failed
        self._is_resting = False  # reading pauses for ``rest_s``
        self._is_waiting = False  # the socket is full; its writer is registered
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._loop.add_reader(sock, self._readable)

    @property
    def is_blocked(self) -> bool:
        """True while data waits for room in the socket."""
        return bool(self._queue)

    def send(
        self,
        data: bytes,
        descriptors: Sequence[int] = (),
        on_sent: Callable[[], None] = lambda: None,
    ) -> bool:
        """Send a frame; call ``on_sent`` when the kernel has all of it.

        If the frame has to wait, the channel duplicates its descriptors; return False
        if the process has reached its limit of open descriptors. If the channel is lost
        before the frame is sent, ``on_sent`` is not called.
        """
        if not self._is_open or self._has_failed:
            return True
        rest = memoryview(data)
        if descriptors and not self._queue:
            try:
                rest = rest[socket.send_fds(self._sock, [data], list(descriptors)) :]
                descriptors = ()
            except BlockingIOError:
                pass
            except OSError:
                self._fail()
                return True
        try:
            copies = tuple(os.dup(number) for number in descriptors)
        except OSError:
            return False
        self._queue.append((rest, copies, on_sent))
        if len(self._queue) == 1:
            self._write()
        return True

    def _write(self) -> None:
        while self._queue and self._is_open and not self._has_failed:
            data, descriptors, on_sent = self._queue[0]
            try:
                if not data:
                    count = 0
                elif descriptors:
                    count = socket.send_fds(self._sock, [data], list(descriptors))
                else:
                    count = self._sock.send(data)
            except BlockingIOError:
                if not self._is_waiting:
                    self._is_waiting = True
                    self._loop.add_writer(self._sock, self._write)
                return
            except OSError:
                self._fail()
                return
            for number in descriptors:
                os.close(number)
            if count < len(data):
                self._queue[0] = data[count:], (), on_sent
                continue
            self._queue.popleft()
            on_sent()
        if self._is_open and self._is_waiting:
            self._is_waiting = False
            self._loop.remove_writer(self._sock)

    def _fail(self) -> None:
        """Stop sending, because the peer is gone; read the rest of its frames."""
        if not self._has_failed:
            self._has_failed = True
            self._loop.call_soon(self._read_rest)

    def _read_rest(self) -> None:
        while self._is_open and self._readable():
            pass
        self.lose()

    def read_now(self) -> None:
        """Read what the socket has buffered, even during a pause of ``rest_s``."""
        if self._is_open:
            self._readable()

    def _readable(self) -> bool:
        """Read once; return whether the socket may have more data."""
        try:
            size, more, flags, _ = self._sock.recvmsg_into(
                [self._read], ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except OSError:
            size, more, flags = 0, [], 0
        for _, _, found in more:
            numbers = array("i")
            numbers.frombytes(found[: len(found) - len(found) % numbers.itemsize])
            self._descriptors.extend(numbers)
        # The peer has closed the socket, or the kernel has dropped descriptors.
        if not size or flags & socket.MSG_CTRUNC:
            self.lose()
            return False
        if self._rest_s and size < READ_BYTES // 4 and not self._is_resting:
            self._is_resting = True
            self._loop.remove_reader(self._sock)
            self._loop.call_later(self._rest_s, self._read_on)
        try:
            for entries in self._reader.feed(self._read[:size]):
                if self._is_open:
                    self._on_frame(entries, self._descriptors)
        except FrameError:
            self.lose()
        return True

    def _read_on(self) -> None:
        self._is_resting = False
        if not self._is_open:
            return
        # If this read is small, too, it starts the next pause. So under steady traffic,
        # the timer alone reads, without adding and removing a reader each time.
        self._readable()
        if self._is_open and not self._is_resting:
            self._loop.add_reader(self._sock, self._readable)

    def lose(self) -> None:
        """Close the channel, as if the peer were gone."""
        if self._is_open:
            self.close()
            self._on_lost()

    def close(self) -> None:
        """Close the channel without any further callback."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        for _, descriptors, _ in self._queue:
            for number in descriptors:
                os.close(number)
        for number in self._descriptors:
            os.close(number)
        self._queue.clear()
        self._descriptors.clear()
        self._sock.close()
