"""The connection of a lane, and its registration with the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

from multiworld.net.streams import Stream

RIGHTS_BYTES = socket.CMSG_SPACE(4)  # bytes of ancillary data for one descriptor


class LaneSocket:
    """A non-blocking connection; the event loop calls back when it is ready."""

    def __init__(
        self,
        sock: Stream,
        on_readable: Callable[[], None],
        on_writable: Callable[[], None],
        poll: Callable[[], None],
    ) -> None:
        self.sock = sock
        self._on_readable, self._on_writable = on_readable, on_writable
        self._poll = poll
        # Under TLS, there may be decrypted bytes that the loop does not know of.
        self._pending: Callable[[], int] | None = getattr(sock, "pending", None)
        self._fd = sock.fileno()
        self._is_tcp = isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX
        self._low_water = 0
        self._loop = asyncio.get_running_loop()
        self.is_open = True
        # ``is_mute``: nothing more can be written.
        self.is_reading = self.is_writing = self.is_mute = False

    def fileno(self) -> int:
        return self._fd if self.is_open else -1

    def write(self, pieces: Sequence[bytes | memoryview]) -> int:
        """Write what the connection takes; return the number of bytes."""
        try:
            return self.sock.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            # Raise nothing: the reader finds the end of the connection, after all data
            # that the peer sent.
            self.is_mute = True
            return 0

    def read(
        self, buffers: list[memoryview], keep: Callable[[bytes], None] | None
    ) -> int:
        """Read what has arrived; return the number of bytes, 0 at the end.

        ``keep`` gets the descriptors that come along; None: the peer sends none.

        Raises:
            OSError: There is nothing to read, or the connection is broken.
        """
        if keep is None:
            return int(self.sock.recvmsg_into(buffers)[0])
        count, rights, flags, _ = self.sock.recvmsg_into(  # type: ignore[call-arg]
            buffers, RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        if flags & socket.MSG_CTRUNC:
            # A descriptor was lost, and the next one would be taken for it.
            raise OSError(
                "a descriptor was lost, because this process has reached its limit of "
                "open files; raise the limit with `ulimit -n`"
            )
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                keep(data)
        return int(count)

    def read_on(self) -> None:
        if not self.is_reading and self.is_open:
            self.is_reading = True
            self._loop.add_reader(self._fd, self._on_readable)
            self.poll_again()

    def read_off(self) -> None:
        if self.is_reading:
            self.is_reading = False
            self._loop.remove_reader(self._fd)

    def write_on(self) -> None:
        if not self.is_writing and self.is_open:
            self.is_writing = True
            self._loop.add_writer(self._fd, self._on_writable)

    def write_off(self) -> None:
        if self.is_writing:
            self.is_writing = False
            self._loop.remove_writer(self._fd)

    def poll_again(self) -> None:
        """Call ``poll`` soon if TLS holds bytes that it has already read."""
        if self._pending is not None and self.is_reading and self._pending():
            self._loop.call_soon(self._poll)

    def wake_at(self, wanted: int) -> None:
        """Call ``on_readable`` for many packets of a payload at once, not for each."""
        if not self._is_tcp or wanted == self._low_water or not self.is_open:
            return
        # The reader cannot wait forever for ``wanted`` bytes: either the rest of the
        # frame arrives, or the connection ends.
        self._low_water = wanted
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, wanted))

    def drain(self, size: int) -> bool:
        """Read and drop up to ``size`` bytes; return False at the end of the stream."""
        try:
            return bool(self.sock.recv(size))
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False

    @property
    def is_local(self) -> bool:
        """True for a Unix socket."""
        return self.sock.family == socket.AF_UNIX

    def finish_writing(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection; call it only once."""
        self.read_off()
        self.write_off()
        self.is_open = False
        self.sock.close()
