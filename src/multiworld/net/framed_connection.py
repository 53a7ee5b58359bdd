"""A connection that carries frames in both directions, without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from multiworld.net import frames
from multiworld.net.streams import Stream

READ_BYTES = 64 * 1024  # maximum bytes of one read
# Evidence if the peer closed the connection in an orderly way.
ENDED = "connection closed by peer"

M = TypeVar("M")


class FramedConnection(Generic[M]):
    """Sends frames, reports arriving ones and the connection's end, owns ``stream``."""

    def __init__(
        self,
        stream: Stream,
        decoder: msgspec.json.Decoder[M],
        on_message: Callable[[M], None],
        on_end: Callable[[str, bool], None],
    ) -> None:
        self._stream, self._decoder = stream, decoder
        # A message that ``decoder`` or ``on_message`` rejects (``ValueError``) ends the
        # connection. ``on_end`` is called once, never from ``close``, with the evidence
        # and whether the peer violated the protocol.
        self._on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._inbox, self._outbox = bytearray(), bytearray()
        self._is_over = False
        self._loop.add_reader(stream.fileno(), self._on_readable)

    @property
    def backlog(self) -> int:
        """Bytes queued for the peer."""
        return len(self._outbox)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message and write as much as the socket takes without waiting."""
        if self._is_over:
            return
        was_empty = not self._outbox
        self._outbox += frames.encode(message)
        if was_empty:
            self._flush()

    def close(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._loop.remove_reader(self._stream.fileno())
        self._loop.remove_writer(self._stream.fileno())
        self._stream.close()

    def _flush(self) -> None:
        try:
            sent = self._stream.send(self._outbox)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            # Report no error here: unread bytes may remain, such as the peer's reason
            # for closing. The reader finds the end of the connection after them.
            sent = len(self._outbox)
        del self._outbox[:sent]
        if self._outbox:
            self._loop.add_writer(self._stream.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._stream.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._stream.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(str(error), is_broken=False)
            return
        if not data:
            self._end(ENDED, is_broken=False)
            return
        self._inbox += data
        try:
            self._deliver()
        except (frames.FrameError, ValueError) as error:
            self._end(repr(error), is_broken=True)

    def _deliver(self) -> None:
        while len(self._inbox) >= 4 and not self._is_over:
            end = 4 + frames.decode_length(bytes(self._inbox[:4]))
            if len(self._inbox) < end:
                return
            body = bytes(self._inbox[4:end])
            del self._inbox[:end]
            self._on_message(frames.decode_body(body, self._decoder))

    def _end(self, evidence: str, *, is_broken: bool) -> None:
        if not self._is_over:
            self.close()
            self._on_end(evidence, is_broken)
