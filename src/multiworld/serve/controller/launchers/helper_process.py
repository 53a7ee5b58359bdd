"""Helper process of the controller, connected by lines on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.fork_server import WaitingServer
from multiworld.serve.controller.launchers.forked_child import ForkedChild
from multiworld.serve.controller.launchers.protocol import (
    Begin,
    Line,
    Ping,
    Pong,
    encode,
)

logger = logging.getLogger("multiworld.serve")

M = TypeVar("M")

END_S = 5.0  # seconds for a helper process to exit before it is killed
PING_S = 1.0  # seconds between pings
MISSED_LIMIT = 5  # unanswered pings after which the process counts as hung
LINE = 2**24  # maximum bytes of a line; enough for thousands of machines


Child = asyncio.subprocess.Process | ForkedChild


class HelperProcess(Generic[M]):
    """A process ``python -m MODULE FD WORDS...`` that sends a line when it is ready."""

    def __init__(
        self,
        module: str,
        log: Path | None,
        decoder: msgspec.json.Decoder[M],
        on_news: Callable[[M], None],  # called with every message after the first
        on_end: Callable[[], None],  # called when the process has closed its socket
        on_hang: Callable[[], None] = lambda: None,
        *,
        # Whether to kill the process if it hangs; False if others would die with it.
        is_replaceable: bool = True,
    ) -> None:
        self._module, self._log, self._decoder = module, log, decoder
        self._on_news, self._on_end, self._on_hang = on_news, on_end, on_hang
        self._is_replaceable = is_replaceable
        self._unanswered = 0
        self._socket: socket.socket | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._process: Child | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._reading is not None and not self._reading.done()

    async def start(
        self,
        words: list[str],
        env: dict[str, str],
        limit_s: float,
        # Forked process to use instead of a new one.
        waiting: WaitingServer | None = None,
    ) -> M:
        """Start the process; return its first message, due within ``limit_s``."""
        # If this call is cancelled, the process runs until ``close`` or the next
        # ``start`` closes its socket.
        try:
            if waiting is None:
                ours = await self._spawn(words, env)
            else:
                ours = self._begin(waiting, words, env)
        except OSError as error:
            raise LaunchError(f"{self._module} did not start: {error}") from error
        if self._writer is not None:
            self._writer.close()  # closes the connection to the previous process
        if self._socket is not None:
            self._socket.close()
        self._socket = ours.dup()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE)
        try:
            async with asyncio.timeout(limit_s):
                line = await reader.readline()
        except OSError:  # the time limit has passed, or the process has exited
            line = b""
        if not line:
            await self.close(limit_s=0.0)
            where = self._log or "the output of the process that started it"
            raise LaunchError(f"{self._module} did not start; see {where}")
        loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._reading = loop.create_task(self._read(reader))
        assert self._process is not None
        self._pinging = loop.create_task(self._ping(self._process))
        return self._decoder.decode(line)

    async def _spawn(self, words: list[str], env: dict[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with _output(self._log) as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(theirs.fileno()),
                *words,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
            )
        theirs.close()
        return ours

    def _begin(
        self, waiting: WaitingServer, words: list[str], env: dict[str, str]
    ) -> socket.socket:
        self._process = ForkedChild(waiting.pid)
        begin = Begin(tuple(words), env, str(self._log or ""))
        with contextlib.suppress(OSError):  # the process may have exited
            waiting.control.sendall(encode(begin))
        return waiting.control

    async def _ping(self, process: Child) -> None:
        while self.is_running and self._process is process:
            if self._unanswered == MISSED_LIMIT:
                logger.error(
                    "%s (process %d) has not answered for %g s%s",
                    self._module,
                    process.pid,
                    MISSED_LIMIT * PING_S,
                    "; it is replaced" if self._is_replaceable else "",
                )
                self._on_hang()
                if self._is_replaceable:
                    process.kill()
                    return
            # Count pings, not seconds: if this process was suspended, it could not
            # read answers meanwhile.
            self._unanswered += 1
            self._send_ping()
            await asyncio.sleep(PING_S)

    def _send_ping(self) -> None:
        """Send a ping on the socket itself: a stream error would drop unread lines."""
        if self._writer is None or self._socket is None or self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() == 0:
            with contextlib.suppress(OSError):
                # The process has exited, or has stopped reading.
                self._socket.send(encode(Ping()))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._unanswered = 0
                news = self._decoder.decode(line)
                if not isinstance(news, Pong):
                    self._on_news(news)
        except (OSError, ValueError) as error:
            # The process exited in the middle of a line.
            logger.warning("%s: %s", self._module, error)
        self._on_end()

    def send(self, order: Line) -> None:
        """Send a message, which is lost if the process has exited."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(order))

    async def close(self, limit_s: float = END_S) -> None:
        """Close the socket and await the exit; kill the process after ``limit_s``."""
        tasks = [t for t in (self._reading, self._pinging) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is None or self._process.returncode is not None:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


def _output(log: Path | None) -> IO[bytes]:
    if log is None:
        return os.fdopen(os.dup(2), "wb")
    return log.open("ab")
