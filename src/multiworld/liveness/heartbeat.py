"""The owner's side of the heartbeat: a helper process or thread. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from multiworld.liveness import heartbeat_helper

logger = logging.getLogger("multiworld.watchdog")

MISSED_LIMIT = 4
"""Reports in a row that may be missing before the helper is replaced: about a second,
well within the default silence, as the peers hear nothing meanwhile."""

Mode = Literal["process", "thread"]


OnReport = Callable[[int, "HeartbeatReport"], None]


@dataclass(frozen=True, slots=True)
class HeartbeatReport:
    """What the helper heard of a peer.

    Attributes:
        state: The peer's process, as its own helper sees it.
        doing: What the thread of its event loop does.
        lag_s: Seconds since its event loop turned, when it said so.
        heard_us_s: Seconds since it heard this process, or None: never yet.
        at: When the beat arrived, in monotonic seconds.
    """

    state: int
    doing: int
    lag_s: float
    heard_us_s: float | None
    at: float


class Heartbeat:
    """Starts, feeds and replaces whoever beats for this process.

    Args:
        on_report: Called on the event loop for every beat that came.
    """

    def __init__(self, on_report: OnReport) -> None:
        self._on_report = on_report
        self._reported = asyncio.Event()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._mode: Mode = "process"
        self._sockets: dict[int, tuple[socket.socket, bytes, bytes]] = {}
        self._unremoved: set[int] = set()
        self._missed = 0
        self._datagrams: dict[int, socket.socket] = {}
        self._passed: set[int] = set()
        self._numbers = itertools.count(1)
        self._unsent: set[int] = set()

    @property
    def helper_pid(self) -> int | None:
        """The helper process, for messages and tests."""
        return None if self._process is None else self._process.pid

    def add(
        self, sock: socket.socket, out_key: bytes, in_key: bytes, mode: Mode
    ) -> int:
        """Let beats go both ways on ``sock``, sealed with the keys (32 bytes each).

        The caller keeps and closes its own copy, and reads nothing from it. Returns
        the number that reports carry.
        """
        if self._control is None:
            self._start(mode)
        number = next(self._numbers)
        self._sockets[number] = sock, out_key, in_key
        self._pass(number)
        return number

    def add_datagrams(self, number: int, sock: socket.socket) -> None:
        """Let the beats of ``number`` go over a connected UDP socket as well.

        Taken over: closed by ``remove`` or ``close``.
        """
        if number in self._sockets:
            self._datagrams[number] = sock
            self._pass(number)
        else:
            sock.close()

    def remove(self, number: int) -> None:
        """End the beats on a socket."""
        datagrams = self._datagrams.pop(number, None)
        if datagrams is not None:
            datagrams.close()
        if self._sockets.pop(number, None) is not None:
            self._passed.discard(number)
            self._unremoved.add(number)
            self._send_removals()

    def _send_removals(self) -> None:
        for number in list(self._unremoved):
            if not self._order(
                heartbeat_helper.encode_order(heartbeat_helper.REMOVE, number)
            ):
                return  # the helper is behind; the next tick tries again
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
            for (
                number,
                state,
                doing,
                lag,
                heard,
                at,
            ) in heartbeat_helper.REPORT.iter_unpack(message):
                if number == heartbeat_helper.END_OF_REPORT:
                    self._reported.set()
                    continue
                heard_us_s = (
                    None if heard == heartbeat_helper.NEVER_MS else heard / 1000
                )
                report = HeartbeatReport(state, doing, lag / 1000, heard_us_s, at)
                self._on_report(number, report)

    async def tick(self) -> bool:
        """Give a sign that the event loop turns, and take the helper's report.

        Returns:
            False if none came within two beats' time: nobody knows what has arrived.

        Replaces a helper that died, or gave no report several times.

        Raises:
            OSError: No helper can be started; the next call tries again.

        Cancellation: safe.
        """
        if self._control is None and not self._sockets:
            return True
        self._check_helper()
        self._send_removals()
        unsent, self._unsent = self._unsent, set()
        for number in unsent & self._sockets.keys():
            self._pass(number)
        self._reported.clear()
        self._order(heartbeat_helper.encode_order(heartbeat_helper.TICK))
        try:
            async with asyncio.timeout(2 * heartbeat_helper.BEAT_S):
                await self._reported.wait()
        except TimeoutError:
            self._missed += 1
            return False
        self._missed = 0
        return True

    def _check_helper(self) -> None:
        code = None if self._process is None else self._process.poll()
        if self._control is not None and code is None and self._missed < MISSED_LIMIT:
            return
        why = f"ended with {code}" if self._missed < MISSED_LIMIT else "is stuck"
        logger.warning("the heartbeat helper %s; starting another", why)
        self._missed = 0
        self._restart()

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        found = [sock.fileno() for sock in self._datagrams.values()]
        return found if self._control is None else [*found, self._control.fileno()]

    def close(self) -> None:
        """End the helper; returns once it is gone."""
        self._sockets.clear()
        for sock in self._datagrams.values():
            sock.close()
        self._datagrams.clear()
        self._stop()

    def _restart(self) -> None:
        self._stop()
        self._passed.clear()
        self._unremoved.clear()
        self._start(self._mode)
        for number in self._sockets:
            self._pass(number)

    def _start(self, mode: Mode) -> None:
        self._mode = mode
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            self._begin(ours, theirs, mode)
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._control = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._listen)

    def _begin(self, ours: socket.socket, theirs: socket.socket, mode: Mode) -> None:
        if mode == "thread":
            beater = heartbeat_helper.HeartbeatHelper(theirs, owner=None)
            self._thread = threading.Thread(
                target=beater.run, name="multiworld-heartbeat", daemon=True
            )
            self._thread.start()
            return
        # A session of its own: a Ctrl-C at the terminal is for the program, not for
        # its helper, which ends with it anyway.
        command = [sys.executable, "-I", "-S", "-E", heartbeat_helper.__file__]
        thread = str(threading.get_native_id())
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), thread],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _stop(self) -> None:
        if self._control is not None:
            with contextlib.suppress(RuntimeError):  # no loop runs any more
                asyncio.get_running_loop().remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._thread is not None:
            self._thread.join(timeout=heartbeat_helper.BEAT_S * 5)
            self._thread = None

    def _pass(self, number: int) -> None:
        """Hand the sockets of ``number`` to the helper; the second one may follow."""
        assert self._control is not None
        sock, out_key, in_key = self._sockets[number]
        datagrams = self._datagrams.get(number)
        try:
            if number not in self._passed:
                order = heartbeat_helper.encode_order(
                    heartbeat_helper.ADD, number, out_key, in_key
                )
                socket.send_fds(self._control, [order], [sock.fileno()])
                self._passed.add(number)
            if datagrams is not None:
                order = heartbeat_helper.encode_order(
                    heartbeat_helper.ADD_DATAGRAMS, number
                )
                socket.send_fds(self._control, [order], [datagrams.fileno()])
        except OSError:
            self._unsent.add(number)  # the helper is behind; the next tick tries again

    def _order(self, order: bytes) -> bool:
        if self._control is None:
            return False
        try:
            self._control.send(order)
        except OSError:
            return False
        return True
