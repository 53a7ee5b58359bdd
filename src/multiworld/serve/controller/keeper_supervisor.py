"""Supervision of the stream keeper, a process that the controller starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from multiworld.net.rare_log import RareLog
from multiworld.serve.controller.detached_process import start_detached
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.record import StateFolder
from multiworld.serve.deadlines import KEEPER_BEAT_S, KEEPER_FOUND_S, KEEPER_START_S
from multiworld.serve.keeper.channel import Channel, add_socket
from multiworld.serve.keeper.frames import PROTOCOL, Entry, Kind, entry, frame
from multiworld.serve.keeper.keeper import Counts
from multiworld.serve.keeper.process import BACKLOG, COUNTS, READY, SUPERVISOR
from multiworld.serve.spec.schema import AppSpec, GatewaySpec

rare_log = RareLog(logging.getLogger("multiworld.serve"))

AGAIN_S = 0.5  # seconds between attempts to start a keeper
# Text of the history entry for each field of ``Counts``.
WORDS = {
    "handed_over": "connections of an exited gateway are continued by another: {}",
    "closed": "connections of an exited gateway are closed; they cannot continue: {}",
    "refused": "connections are refused with 503 because no gateway takes them: {}",
    "unprotected": "gateway.keeper_memory_mb is full; unprotected requests: {}",
    "hung": "gateways that hung and were killed by the stream keeper: {}",
}

# Environment of the keeper. It makes malloc return the memory of large dropped answers
# to the kernel (mallopt(3)).
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(256 * 1024)}

END_S = 2.0  # seconds for the keeper's exit after SIGTERM


class KeeperSupervisor:
    """Starts or adopts a keeper, and replaces it when it is lost or hangs."""

    def __init__(
        self,
        folder: StateFolder,
        # Stays open until the service exits, so that no client is refused while there
        # is no keeper.
        listener: socket.socket,
        history: History,
        app: Callable[[], AppSpec],  # an update changes the spec
    ) -> None:
        self._app = app
        self._history = history
        # The latest counts of the keeper with this process id; None: none yet.
        self._counts: Counts | None = None
        self._counted = 0
        self._path = folder.keeper
        self._alive, self._log = folder.alive, folder.logs / "keeper.log"
        self._silence_s = app().silence_s  # read once, because no update changes it
        self._channel: Channel | None = None
        # The controller's own socket, then those of earlier controllers' keepers.
        self._listeners = [listener]
        self._lost = asyncio.Event()
        self._unanswered = 0  # heartbeats sent since the keeper's last message
        self._has_answered = False
        self.pid = 0  # process id of the keeper; 0: none runs

    async def run(self) -> None:
        """Supervise the keeper until cancelled, which leaves the keeper running."""
        is_first = True
        while True:
            channel = self._reach()
            if channel is None:
                try:
                    await self._start()
                    if not is_first:
                        self._history.say("keeper", "the stream keeper was replaced")
                except (OSError, TimeoutError) as error:
                    rare_log.error("the stream keeper cannot be started", error)
                    await asyncio.sleep(AGAIN_S)
                is_first = False
                continue
            is_first = False
            try:
                await self._watch(channel)
            finally:
                channel.close()
            if not self._has_answered:
                text = "the stream keeper does not answer and is replaced"
                self._history.say("keeper", text)
                # The keeper may be of another release.
                _signal(self.pid, signal.SIGKILL)
                await asyncio.sleep(AGAIN_S)
            self.pid = 0

    def _reach(self) -> Channel | None:
        """Return a channel to the keeper; None if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._path))
        except OSError:
            sock.close()
            return None
        self.pid = _pid_of(sock)
        if self.pid != self._counted:
            self._counts, self._counted = None, self.pid
        self._lost.clear()
        self._unanswered, self._has_answered = 0, False
        channel = Channel(sock, self._framed, self._lost.set)
        channel.send(frame([entry(Kind.HELLO, 0, PROTOCOL, SUPERVISOR)]))
        # A keeper of an earlier controller does not have this controller's listener
        # yet.
        greeting = frame([entry(Kind.LISTENER), self._beat()])
        channel.send(greeting, [self._listeners[0].fileno()])
        self._channel = channel
        return channel

    def _beat(self) -> bytes:
        return entry(Kind.BEAT, 0, self._gateway.replicas)

    @property
    def _gateway(self) -> GatewaySpec:
        return self._app().gateway

    async def _watch(self, channel: Channel) -> None:
        while not self._lost.is_set():
            channel.send(frame([self._beat()]))
            self._unanswered += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KEEPER_BEAT_S):
                    await self._lost.wait()
            # Count heartbeats, not seconds: if this process was paused, the keeper got
            # no heartbeats to answer.
            if self._unanswered * KEEPER_BEAT_S > self._silence_s:
                rare_log.error("the stream keeper hangs and is replaced", str(self.pid))
                _signal(self.pid, signal.SIGKILL)

    def _framed(self, entries: list[Entry], descriptors: deque[int]) -> None:
        self._unanswered, self._has_answered = 0, True
        for each in entries:
            if each.kind is Kind.LISTENER:
                add_socket(descriptors.popleft(), self._listeners)
            elif each.kind is Kind.BEAT and len(each.payload) == COUNTS.size:
                self._report(Counts(*COUNTS.unpack(each.payload)))

    def _report(self, counts: Counts) -> None:
        """Record changes of the keeper's counts in the history."""
        before, self._counts = self._counts, counts
        if before is None:
            return  # most of them have been recorded by an earlier controller
        self._history.handed_over += counts.handed_over - before.handed_over
        for name, text in WORDS.items():
            if (more := getattr(counts, name) - getattr(before, name)) > 0:
                self._history.say("connections", text.format(more))

    async def _start(self) -> None:
        """Start a keeper, and wait until it listens."""
        for each in self._listeners:
            each.listen(BACKLOG)  # clients may connect, and wait for the keeper
        listeners = [each.fileno() for each in self._listeners]
        command = [sys.executable, "-m", "multiworld.serve.keeper.process"]
        command += ["--socket", str(self._path), "--alive", str(self._alive)]
        command += ["--silence", str(self._silence_s)]
        command += ["--memory", str(self._gateway.keeper_memory_mb)]
        command += ["--active", str(self._gateway.replicas)]
        for number in listeners:
            command += ["--listener", str(number)]
        process = start_detached(command, self._log, MALLOC, listeners)
        try:
            async with asyncio.timeout(KEEPER_START_S):
                line = await process.first_line()
            if line.strip() != READY:
                raise OSError(f"it exited before it was ready; see {self._log}")
        except BaseException:
            # Kill it: otherwise it would accept connections beside the next keeper, but
            # have no gateways to give them to.
            process.kill()
            raise
        self._counts, self._counted = Counts(), process.pid

    def ending(self) -> None:
        """Make the keeper hold connections for the next service, if the spec says so.

        Call it before the gateways exit.
        """
        if self._gateway.handover_s and self._channel is not None:
            wait_ms = int(1000 * self._gateway.handover_s)
            self._channel.send(frame([entry(Kind.AWAIT, 0, wait_ms)]))

    async def end(self) -> None:
        """Stop an exited service's keeper, unless it waits for the next service."""
        if self.pid and not self._gateway.handover_s:
            _signal(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._lost.wait()
        for each in self._listeners[1:]:
            each.close()


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _pid_of(sock: socket.socket) -> int:
    """Return the process at the other end of a connected Unix socket."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("3i", found)[0]
    return pid


def port_of_keeper(path: Path) -> int:
    """Return the port that a running keeper listens on; 0 if none runs.

    A keeper that hangs, or speaks another protocol, is killed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(KEEPER_FOUND_S)
        try:
            sock.connect(str(path))
            sock.sendall(frame([entry(Kind.HELLO, 0, PROTOCOL, SUPERVISOR)]))
            answer = len(frame([entry(Kind.LISTENER)]))
            _, found, _, _ = socket.recv_fds(sock, answer, 1)
        except TimeoutError:
            found = []
        except OSError:
            return 0
        if not found:
            _signal(_pid_of(sock), signal.SIGKILL)
            return 0
    with socket.socket(fileno=found[0]) as listener:
        return int(listener.getsockname()[1])
