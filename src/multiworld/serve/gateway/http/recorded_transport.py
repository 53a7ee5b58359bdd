"""Sockets and transports of recorded connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from multiworld.serve.keeper import counters
from multiworld.serve.keeper.connection_record import ConnectionRecord
from multiworld.serve.keeper.frames import Kind


class Recording(Protocol):
    """The part of a connection's recorder that the transport uses."""

    def say(self, kind: Kind, value: int = 0, payload: bytes = b"") -> None:
        """Record an entry."""

    def output(
        self, data: bytes, *, is_interim: bool, write: Callable[[], None]
    ) -> None:
        """Record output; call ``write`` once the keeper has it."""

    def then(self, call: Callable[[], None]) -> None:
        """Call a function once the keeper has all entries so far."""


class PeekedSocket(socket.socket):
    """A client's connection; bytes that were read stay in the kernel until ``take``.

    If the gateway is lost, the keeper or the kernel still has every byte that it read.
    """

    _taken = memoryview(bytearray(256 * 1024))  # target of ``recv_into``; never read
    is_abandoned = False

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(size, flags | socket.MSG_PEEK)

    def close(self) -> None:
        """Also shut down output, as the keeper's duplicate keeps the socket open."""
        if not self.is_abandoned:
            with contextlib.suppress(OSError):
                self.shutdown(socket.SHUT_WR)
        super().close()

    def take(self, size: int) -> None:
        """Consume ``size`` bytes that were read before."""
        while size > 0 and self.fileno() >= 0:
            # The kernel discards the bytes without copying them (tcp(7), MSG_TRUNC).
            size -= self.recv_into(self._taken, size, socket.MSG_TRUNC) or size

    def take_recorded(self, record: ConnectionRecord) -> None:
        """Consume bytes that an earlier gateway recorded, but left in the kernel."""
        end = record.input_at + len(record.input)
        self.take(record.read_before + end - counters.read(self))


class NoTransport(asyncio.Transport):
    """The transport of a connection without a client: nothing is read or written."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._is_closing = False

    def _nothing(self, *args: Any, **options: Any) -> None:
        """Do nothing."""

    write = write_eof = pause_reading = resume_reading = _nothing
    set_write_buffer_limits = _nothing

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

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

    def __init__(self, transport: Any, recorder: Recording) -> None:
        self._transport, self._recorder = transport, recorder
        self._waiting = 0  # bytes of output that the keeper does not yet have
        self._is_closing = False
        self._pauses: set[str] = set()  # names of the callers that have paused reading

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
