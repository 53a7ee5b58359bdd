"""The owner's side of the heartbeat helper, a process or a thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from multiworld.config import HEARTBEAT_S
from multiworld.liveness import heartbeat_helper

logger = logging.getLogger("multiworld.watchdog")

# Seconds without a report until the helper is replaced: well within the default
# ``silence_s``, because the peers may hear nothing meanwhile.
MISSED_S = 0.8
START_S = 5.0  # the same for one that has not reported yet: it may be slow to start

Mode = Literal["process", "thread"]

OnReport = Callable[[int, "HeartbeatReport"], None]


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """A peer's latest heartbeat, and its time of arrival on the monotonic clock."""

    state: int  # or ``ENDED``, for the connection
    doing: int
    lag_s: float
    heard_us_s: float | None  # None: never
    at: float


class Heartbeat:
    """Starts, feeds and replaces the helper that sends this process's heartbeats."""

    def __init__(self, on_report: OnReport, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._has_reported = False
        self._on_report = on_report
        self._reported = asyncio.Event()
        self._control: socket.socket | None = None
        self._sign: mmap.mmap | bytearray = bytearray(heartbeat_helper.SIGN.size)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._mode: Mode = "process"
        self._sockets: dict[int, tuple[socket.socket, bytes, bytes]] = {}
        self._unremoved: set[int] = set()
        self._missed = 0
        self._datagrams: dict[int, socket.socket] = {}
        self._added: set[int] = set()
        self._numbers = itertools.count(1)
        self._unsent: set[int] = set()

    @property
    def helper_pid(self) -> int | None:
        """Process ID of the helper; None for a thread."""
        return None if self._process is None else self._process.pid

    def add(
        self, sock: socket.socket, out_key: bytes, in_key: bytes, mode: Mode
    ) -> int:
        """Exchange heartbeats on a socket; return the connection's number."""
        is_new = self._control is None
        if is_new:
            self._start(mode)
        number = next(self._numbers)
        # The caller closes its copy after ``remove``, and reads nothing from it.
        self._sockets[number] = sock, out_key, in_key
        for each in list(self._sockets) if is_new else [number]:
            self._send_sockets(each)
        return number

    def add_datagrams(self, number: int, sock: socket.socket) -> None:
        """Send a connection's heartbeats over this UDP socket too, and own it."""
        if number in self._sockets:
            self._datagrams[number] = sock
            if self._control is not None:  # else the next helper gets it at its start
                self._send_sockets(number)
        else:
            sock.close()

    def remove(self, number: int) -> None:
        datagrams = self._datagrams.pop(number, None)
        if datagrams is not None:
            datagrams.close()
        if self._sockets.pop(number, None) is not None:
            self._added.discard(number)
            self._unremoved.add(number)
            self._send_removals()

    def _send_removals(self) -> None:
        for number in list(self._unremoved):
            if self._control is None:
                return
            order = heartbeat_helper.encode_order(heartbeat_helper.REMOVE, number)
            try:
                self._control.send(order)
            except OSError:
                return  # the helper reads too slowly; the next tick tries again
            self._unremoved.discard(number)

    def _listen(self) -> None:
        while self._control is not None:
            try:
                message = self._control.recv(heartbeat_helper.READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                message = b""
            if not message:
                # The helper ended; the next tick starts another.
                asyncio.get_running_loop().remove_reader(self._control.fileno())
                return
            for entry in heartbeat_helper.REPORT.iter_unpack(message):
                number, state, doing, lag, heard, at = entry
                if number == heartbeat_helper.END_OF_REPORT:
                    self._has_reported = True
                    self._reported.set()
                    continue
                is_heard = heard != heartbeat_helper.NEVER_MS
                heard_us_s = heard / 1000 if is_heard else None
                report = HeartbeatReport(state, doing, lag / 1000, heard_us_s, at)
                self._on_report(number, report)

    async def tick(self) -> bool:
        """Signal that the event loop runs, and wait for the helper's next report."""
        if self._control is None and not self._sockets:
            await asyncio.sleep(self._heartbeat_s)
            return True
        self._check_helper()
        self._send_removals()
        unsent, self._unsent = self._unsent, set()
        for number in unsent & self._sockets.keys():
            self._send_sockets(number)
        self._reported.clear()
        give_sign(self._sign)
        try:
            async with asyncio.timeout(2 * self._heartbeat_s):
                await self._reported.wait()
        except TimeoutError:
            # A late loop may have read the report in the iteration of the timeout.
            if not self._reported.is_set():
                self._missed += 1
                return False
        self._missed = 0
        return True

    def _forget_sign(self) -> None:
        if isinstance(self._sign, mmap.mmap):
            self._sign.close()
            self._sign = bytearray(heartbeat_helper.SIGN.size)

    def _check_helper(self) -> None:
        code = None if self._process is None else self._process.poll()
        limit_s = MISSED_S if self._has_reported else START_S
        # Each miss is a wait of two intervals.
        is_stuck = self._missed >= max(2, round(limit_s / (2 * self._heartbeat_s)))
        if self._control is not None and code is None and not is_stuck:
            return
        why = "is stuck" if is_stuck else f"exited with {code}"
        logger.warning("the heartbeat helper %s; starting another", why)
        self._missed = 0
        self._restart()

    def filenos(self) -> list[int]:
        found = [sock.fileno() for sock in self._datagrams.values()]
        return found if self._control is None else [*found, self._control.fileno()]

    def close(self) -> None:
        self._sockets.clear()
        for sock in self._datagrams.values():
            sock.close()
        self._datagrams.clear()
        self._stop()

    def _restart(self) -> None:
        self._stop()
        self._added.clear()
        self._unremoved.clear()
        self._start(self._mode)
        for number in self._sockets:
            self._send_sockets(number)

    def _start(self, mode: Mode) -> None:
        self._mode, self._has_reported = mode, False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._begin(ours, theirs, mode)
        except BaseException:
            ours.close()
            theirs.close()
            self._forget_sign()
            raise
        self._control = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._listen)

    def _begin(self, ours: socket.socket, theirs: socket.socket, mode: Mode) -> None:
        if mode == "thread":
            give_sign(self._sign)
            helper = heartbeat_helper.HeartbeatHelper(
                theirs, self._sign, owner=None, heartbeat_s=self._heartbeat_s
            )
            self._thread = threading.Thread(
                target=helper.run, name="multiworld-heartbeat", daemon=True
            )
            self._thread.start()
            return
        # Its own session: Ctrl-C at the terminal must reach the program, not the
        # helper, which exits with the program anyway.
        command = [sys.executable, "-I", "-S", "-E", heartbeat_helper.__file__]
        thread = threading.get_native_id()
        memory = _shared_memory(heartbeat_helper.SIGN.size)
        try:
            self._sign = mmap.mmap(memory, heartbeat_helper.SIGN.size)
            give_sign(self._sign)
            with theirs:
                numbers = theirs.fileno(), memory, os.getpid(), thread
                self._process = subprocess.Popen(
                    [*command, *map(str, (*numbers, self._heartbeat_s))],
                    pass_fds=[theirs.fileno(), memory],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        finally:
            os.close(memory)

    def _stop(self) -> None:
        if self._control is not None:
            with contextlib.suppress(RuntimeError):  # the loop no longer runs
                asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._forget_sign()
        if self._thread is not None:
            self._thread.join(timeout=self._heartbeat_s * 5)
            self._thread = None

    def _send_sockets(self, number: int) -> None:
        assert self._control is not None
        sock, out_key, in_key = self._sockets[number]
        datagrams = self._datagrams.get(number)
        try:
            if number not in self._added:
                order = heartbeat_helper.encode_order(
                    heartbeat_helper.ADD, number, out_key, in_key
                )
                socket.send_fds(self._control, [order], [sock.fileno()])
                self._added.add(number)
            if datagrams is not None:
                order = heartbeat_helper.encode_order(
                    heartbeat_helper.ADD_DATAGRAMS, number
                )
                socket.send_fds(self._control, [order], [datagrams.fileno()])
        except OSError:
            self._unsent.add(number)  # it reads too slowly; the next tick tries again


def give_sign(sign: mmap.mmap | bytearray) -> None:
    # In one assignment: ``pack_into`` could let the helper read a zero.
    sign[:] = heartbeat_helper.SIGN.pack(time.monotonic())


def _shared_memory(size: int) -> int:
    try:
        memory = os.memfd_create("multiworld-sign")
    except OSError:  # not allowed here; a file does as well
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory
