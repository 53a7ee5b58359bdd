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
from multiworld.net.forks import closed_in_forks

logger = logging.getLogger("multiworld.watchdog")

# Seconds without a report after which the helper is replaced. This is well below the
# default ``silence_s``, because the peers may hear nothing in the meantime.
MISSED_S = 0.8
# Until a helper's first report, this limit applies instead: it may start slowly.
START_S = 5.0

REAP_S = 0.1  # seconds to wait until a killed helper exits

Mode = Literal["process", "thread"]

OnReport = Callable[[int, "HeartbeatReport"], None]


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """A peer's latest heartbeat, and its time of arrival on the monotonic clock."""

    state: int  # state of the peer's process; ``ENDED``: the heartbeat connection ended
    doing: int
    lag_s: float
    heard_us_s: float | None  # seconds since the peer heard this process; None: never
    at: float


@dataclass(slots=True)
class _Helper:
    """A helper process that takes over once it has reported."""

    control: socket.socket
    sign: mmap.mmap
    process: subprocess.Popen[bytes]


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
        self._standby: _Helper | None = None
        # Helpers that were killed and not reaped yet.
        self._ending: list[subprocess.Popen[bytes]] = []

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
        # The caller must read nothing from ``sock``, and close it only after
        # ``remove``.
        self._sockets[number] = sock, out_key, in_key
        for each in list(self._sockets) if is_new else [number]:
            self._send_sockets(each)
        return number

    def add_datagrams(self, number: int, sock: socket.socket) -> None:
        """Also send a connection's heartbeats over a UDP socket, and own the socket."""
        if number in self._sockets:
            self._datagrams[number] = sock
            # If no helper runs now, the next helper gets the socket when it starts.
            if self._control is not None:
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
                return  # the helper reads too slowly; the next tick retries
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
                # The helper has exited; the next tick starts another.
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
        """Give the event loop's sign and wait for the helper's next report; return
        whether a report came."""
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
        began = time.monotonic()
        try:
            async with asyncio.timeout(2 * self._heartbeat_s):
                await self._reported.wait()
        except TimeoutError:
            # If the event loop was late, the report may have arrived in the iteration
            # that timed out.
            if not self._reported.is_set():
                # Count no miss if the event loop was late: the helper may have starved,
                # too.
                took_s = time.monotonic() - began
                self._missed += took_s <= 3 * self._heartbeat_s
                return False
        self._missed = 0
        self._drop_standby()
        return True

    def _forget_sign(self) -> None:
        if isinstance(self._sign, mmap.mmap):
            self._sign.close()
            self._sign = bytearray(heartbeat_helper.SIGN.size)

    def _check_helper(self) -> None:
        code = None if self._process is None else self._process.poll()
        limit_s = MISSED_S if self._has_reported else START_S
        # Each miss took two intervals of ``heartbeat_s``.
        is_stuck = self._missed >= max(2, round(limit_s / (2 * self._heartbeat_s)))
        self._ending = [each for each in self._ending if each.poll() is None]
        if self._control is not None and code is None and not is_stuck:
            return
        if is_stuck and code is None and self._process is not None:
            self._prepare_standby()
            return
        why = "is stuck" if is_stuck else f"exited with {code}"
        logger.warning("the heartbeat helper %s; starting another", why)
        self._missed = 0
        self._restart()

    def _prepare_standby(self) -> None:
        """Start a standby helper beside a helper that does not report.

        Whatever starved the helper may delay the standby, too. So the helper continues,
        if it can, until the standby has reported.
        """
        if self._standby is not None and self._standby.process.poll() is None:
            return
        self._drop_standby()
        logger.warning("the heartbeat helper is stuck; starting another")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        closed_in_forks(ours)
        ours.setblocking(False)
        try:
            sign, process = self._spawn(theirs)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._standby = _Helper(ours, sign, process)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._take_over)

    def _take_over(self) -> None:
        """Let the standby replace the helper, which does not report."""
        assert self._standby is not None
        standby = self._standby
        try:
            is_there = bool(standby.control.recv(heartbeat_helper.READ_BYTES))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_there = False
        if not is_there:
            self._drop_standby()
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(standby.control.fileno())
        self._standby = None
        self._stop()
        self._control, self._sign = standby.control, standby.sign
        self._process, self._missed, self._has_reported = standby.process, 0, True
        give_sign(self._sign)
        loop.add_reader(self._control.fileno(), self._listen)
        self._send_all()

    def _drop_standby(self) -> None:
        """Kill the standby, which is not needed or has exited."""
        standby, self._standby = self._standby, None
        if standby is None:
            return
        with contextlib.suppress(RuntimeError):  # there is no running event loop
            asyncio.get_running_loop().remove_reader(standby.control.fileno())
        standby.control.close()
        standby.sign.close()
        standby.process.kill()
        self._ending.append(standby.process)

    def close(self) -> None:
        self._sockets.clear()
        for sock in self._datagrams.values():
            sock.close()
        self._datagrams.clear()
        self._drop_standby()
        self._stop()
        # Reap in threads, because it may take long on a busy machine.
        for process in self._ending:
            reap = threading.Thread(
                target=process.wait, name="multiworld-reap", daemon=True
            )
            # If no thread can be started, do not reap the process.
            with contextlib.suppress(RuntimeError):
                reap.start()
        self._ending.clear()

    def _restart(self) -> None:
        self._drop_standby()
        self._stop()
        self._start(self._mode)
        self._send_all()

    def _send_all(self) -> None:
        """Send all sockets to a helper that has none yet."""
        for number in self._sockets:
            self._send_sockets(number)

    def _start(self, mode: Mode) -> None:
        self._mode, self._has_reported = mode, False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        closed_in_forks(ours)
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
        self._sign, self._process = self._spawn(theirs)

    def _spawn(
        self, theirs: socket.socket
    ) -> tuple[mmap.mmap, subprocess.Popen[bytes]]:
        """Start a helper process on ``theirs``, which is closed in this process."""
        # The helper gets a session of its own, so that Ctrl-C at the terminal does not
        # reach it. It exits with the program anyway.
        command = [sys.executable, "-I", "-S", "-E", heartbeat_helper.__file__]
        thread = threading.get_native_id()
        memory = _shared_memory(heartbeat_helper.SIGN.size)
        try:
            sign = mmap.mmap(memory, heartbeat_helper.SIGN.size)
            give_sign(sign)
            with theirs:
                numbers = theirs.fileno(), memory, os.getpid(), thread
                process = subprocess.Popen(
                    [*command, *map(str, (*numbers, self._heartbeat_s))],
                    pass_fds=[theirs.fileno(), memory],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            return sign, process
        finally:
            os.close(memory)

    def _stop(self) -> None:
        self._added.clear()  # no sockets were passed to the next helper yet
        self._unremoved.clear()
        if self._control is not None:
            with contextlib.suppress(RuntimeError):  # there is no running event loop
                asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            try:  # exiting may take long if memory or disk is scarce
                self._process.wait(REAP_S)
            except subprocess.TimeoutExpired:
                self._ending.append(self._process)
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
            # The helper reads too slowly; the next tick retries.
            self._unsent.add(number)


def give_sign(sign: mmap.mmap | bytearray) -> None:
    # One assignment, because the helper could read a zero while ``pack_into`` writes.
    sign[:] = heartbeat_helper.SIGN.pack(time.monotonic())


def _shared_memory(size: int) -> int:
    try:
        memory = os.memfd_create("multiworld-sign")
    except OSError:  # a memfd is not permitted, so use a file
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.ftruncate(memory, size)
    return memory
