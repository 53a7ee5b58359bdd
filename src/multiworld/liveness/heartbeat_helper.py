"""The heartbeat helper: sends and reads heartbeats outside the owner's GIL.

The helper runs as a script in its own process (``python -I -S -E heartbeat_helper.py FD
SIGN PID TID HEARTBEAT_S``) or in a thread, and uses the standard library only. Every
``heartbeat_s`` it reads the peers' heartbeats, reports new ones over the control
socket, and sends one frame to each peer. The owner's event loop writes its sign (a
time) to shared memory, without waking the helper.

The helper exits with its owner: at the end of the control socket, or when its parent
changes (a forked child of the owner may hold the control socket open).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import mmap
import os
import resource
import selectors
import socket
import struct
import sys
import time

# States of a process. ``ENDED`` is not one: it means that the heartbeat connection
# ended.
RUNNING, STOPPED, GONE, ENDED = 0, 1, 2, 3
# Values of ``doing``: the event loop's thread sleeps in a system call, or runs.
WAITING, COMPUTING = 0, 1
# Value of ``HeartbeatFrame.heard_ms`` if the sender has never heard the receiver.
NEVER_MS = 0xFFFFFFFF
# The owner's last sign of life: its monotonic time in seconds.
SIGN = struct.Struct("<d")
# Kinds of orders from the owner. ``ADD`` and ``ADD_DATAGRAMS`` come with a socket.
ADD, ADD_DATAGRAMS, REMOVE = b"A", b"D", b"R"

KEY_BYTES = 32

_ORDER = struct.Struct(f"<cQ{KEY_BYTES}s{KEY_BYTES}s")

MAGIC = b"MWB2"
_SEAL_BYTES = 12
_FRAME = struct.Struct("<4sBB2xQII")
FRAME_BYTES = _FRAME.size + _SEAL_BYTES

# An entry of a report: the connection's number, state, doing, lag_ms, heard_ms, and
# time of arrival (monotonic, in seconds).
REPORT = struct.Struct("<QBBIId")
REPORTS_A_MESSAGE = 64  # maximum number of entries in a message
# Number of the entry that ends a report; no connection has this number.
END_OF_REPORT = 0
READ_BYTES = 64 * 1024  # maximum bytes of one read
DATAGRAMS_AT_ONCE = 64  # maximum number of datagrams read from one peer per iteration


class HeartbeatFrame:
    """Content of one heartbeat frame."""

    __slots__ = ("doing", "heard_ms", "lag_ms", "sequence", "state")

    def __init__(
        self, state: int, doing: int, sequence: int, lag_ms: int, heard_ms: int
    ) -> None:
        # ``doing`` is meaningful only while the event loop does not respond.
        self.state, self.doing, self.sequence = state, doing, sequence
        self.lag_ms, self.heard_ms = lag_ms, heard_ms


def encode_order(
    order: bytes, number: int = 0, out_key: bytes = b"", in_key: bytes = b""
) -> bytes:
    """Return a message to the helper. Keys differ, so reflected frames are invalid."""
    return _ORDER.pack(order, number, out_key, in_key)


def seal(body: bytes, key: bytes) -> bytes:
    """Return the authentication code of a frame: a truncated HMAC (SHA-256)."""
    return hmac.digest(key, body, hashlib.sha256)[:_SEAL_BYTES]


def encode_heartbeat(heartbeat: HeartbeatFrame, key: bytes) -> bytes:
    lag_ms = min(heartbeat.lag_ms, NEVER_MS)
    heard_ms = min(heartbeat.heard_ms, NEVER_MS)
    body = _FRAME.pack(
        MAGIC, heartbeat.state, heartbeat.doing, heartbeat.sequence, lag_ms, heard_ms
    )
    return body + seal(body, key)


def decode_heartbeat(frame: bytes, key: bytes) -> HeartbeatFrame:
    """Return the heartbeat in a frame; raise ``ValueError`` if it is not authentic."""
    body = frame[: _FRAME.size]
    magic, state, doing, sequence, lag_ms, heard_ms = _FRAME.unpack(body)
    if magic != MAGIC or state not in (RUNNING, STOPPED):
        raise ValueError("the frame is not a heartbeat")
    if not hmac.compare_digest(frame[_FRAME.size :], seal(body, key)):
        raise ValueError("the heartbeat has a wrong authentication code")
    return HeartbeatFrame(state, doing, sequence, lag_ms, heard_ms)


def _stat_of(path: str) -> list[bytes] | None:
    try:
        with open(path, "rb") as stat:
            return stat.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return None


class StopLook:
    """Detects a process that is stopped at two checks in a row without work in between.

    A process that is stopped and continued in pulses, as by ``cpulimit``, may be
    stopped at every check, but works in between.
    """

    def __init__(self) -> None:
        # The ``did`` of the last check if the process was stopped then; otherwise None.
        self._did: object = None

    def state(self, state: int, did: object) -> int:
        """Return the state after a check; ``did`` changes when the process runs."""
        before, self._did = self._did, did if state == STOPPED else None
        return RUNNING if state == STOPPED and before != did else state


def work_of(pid: int, tid: int) -> object:
    """Return a value from ``/proc`` that changes whenever a thread runs."""
    try:
        # The line has nanoseconds on a processor, nanoseconds waiting for one, and
        # timeslices.
        with open(f"/proc/{pid}/task/{tid}/schedstat", "rb") as file:
            return file.read()
    except OSError:
        fields = None
        with contextlib.suppress(OSError):
            fields = _stat_of(f"/proc/{pid}/stat")
        return None if fields is None else fields[11:13]  # user and system time


def process_state(pid: int) -> int:
    """Return a process's state from ``/proc``; ``RUNNING`` if that is unreadable."""
    try:
        fields = _stat_of(f"/proc/{pid}/stat")
    except OSError:
        return RUNNING
    if fields is None:
        return RUNNING if _exists(pid) else GONE
    if fields[0] in (b"T", b"t"):
        return STOPPED
    return GONE if fields[0] in (b"X", b"x") else RUNNING


def _exists(pid: int) -> bool:
    """Return whether a process exists, even if ``/proc`` hides it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process belongs to another user, so it exists
        pass
    return True


def thread_doing(pid: int, tid: int) -> int:
    """Return whether a thread is ``COMPUTING`` or ``WAITING``, from ``/proc``."""
    try:
        fields = _stat_of(f"/proc/{pid}/task/{tid}/stat")
    except OSError:
        fields = None
    return COMPUTING if fields is not None and fields[0] == b"R" else WAITING


class HeartbeatTarget:
    """One peer; if it reads slowly, it gets fewer heartbeats, but never a torn one."""

    def __init__(self, sock: socket.socket, out_key: bytes, in_key: bytes) -> None:
        sock.setblocking(False)
        self.sock = sock
        # Between hosts, frames travel over both TCP and UDP, and the first copy counts:
        # after an outage TCP backs off, and UDP may be filtered.
        self.datagrams: socket.socket | None = None
        # ``is_ended``: the connection has ended. ``is_reported``: the owner knows that.
        self.is_ended = self.is_reported = False
        self._out_key, self._in_key = out_key, in_key
        self._rest = b""
        self._inbox = b""
        self._sequence = 0
        self.heard_at: float | None = None
        self.latest: HeartbeatFrame | None = None

    def send(self, heartbeat: HeartbeatFrame) -> None:
        """Send a heartbeat, or the rest of the previous one if that is unsent."""
        fresh = encode_heartbeat(heartbeat, self._out_key)
        if self.datagrams is not None:
            try:
                self.datagrams.send(fresh)
            except OSError:
                # UDP is refused, filtered or has no route; TCP carries the frame, too.
                pass
        if self.is_ended:
            return
        frame = self._rest or fresh
        try:
            sent = self.sock.send(frame)
        except OSError:
            return  # the connection is full or has ended; ``read`` notices an end
        self._rest = frame[sent:]

    def read(self, now: float) -> bool:
        """Read heartbeats from the connection; return False at its end."""
        try:
            data = self.sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self._inbox += data
        while len(self._inbox) >= FRAME_BYTES:
            frame = self._inbox[:FRAME_BYTES]
            try:
                self._take(decode_heartbeat(frame, self._in_key), now)
                self._inbox = self._inbox[FRAME_BYTES:]
            except ValueError:
                # The peer's helper was replaced in the middle of a frame, or an
                # untrusted peer sent this. Continue at the next frame's marker.
                start = self._inbox.find(MAGIC, 1)
                self._inbox = self._inbox[start:] if start > 0 else b""
        return bool(data)

    def read_datagrams(self, now: float) -> None:
        assert self.datagrams is not None
        for _ in range(DATAGRAMS_AT_ONCE):
            try:
                frame = self.datagrams.recv(FRAME_BYTES + 1)
                self._take(decode_heartbeat(frame, self._in_key), now)
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, ValueError, struct.error):
                # This is the error of an earlier send, or an untrusted datagram: skip
                # it.
                if not self._is_readable():
                    return

    def _is_readable(self) -> bool:
        assert self.datagrams is not None
        try:
            self.datagrams.recv(1, socket.MSG_PEEK)
        except OSError:
            return False
        return True

    def _take(self, heartbeat: HeartbeatFrame, now: float) -> None:
        if heartbeat.sequence > self._sequence:
            self._sequence = heartbeat.sequence
            self.heard_at, self.latest = now, heartbeat


class HeartbeatHelper:
    """The helper's loop; ``thread`` is the native ID of the owner's loop thread."""

    def __init__(
        self,
        control: socket.socket,
        sign: mmap.mmap | bytearray,
        owner: int | None,
        heartbeat_s: float,
        thread: int = 0,
    ) -> None:
        self._sign, self._heartbeat_s = sign, heartbeat_s
        control.setblocking(False)
        self._control, self._owner, self._thread = control, owner, thread
        self._targets: dict[int, HeartbeatTarget] = {}
        # Connections whose latest state is not reported yet. None: the peer could not
        # be added.
        self._unreported: dict[int, HeartbeatTarget | None] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._is_over = False
        self._stops = StopLook()

    def run(self) -> None:
        """Send and read heartbeats, once per interval, until the owner exits."""
        # Run the first iteration at once, because the owner waits for the first report.
        due = time.monotonic()
        while not self._is_over:
            if self._selector.select(max(0.0, due - time.monotonic())):
                self._handle_order()
            # Read once per interval: reading each heartbeat as it arrives would cost
            # several times more.
            if time.monotonic() >= due:
                self._read()
                self._report()
                self._send_heartbeats()
                due = time.monotonic() + self._heartbeat_s
        for number in list(self._targets):
            self._drop(number)
        self._selector.close()
        self._control.close()

    def _send_heartbeats(self) -> None:
        now = time.monotonic()
        state, doing = RUNNING, WAITING
        lag_ms = max(0, int((now - SIGN.unpack_from(self._sign)[0]) * 1000))
        if self._owner is not None:
            state = process_state(self._owner)
            if state == GONE or os.getppid() != self._owner:
                self._is_over = True
                return
            if state == STOPPED:
                did = work_of(self._owner, self._thread), bytes(self._sign)
                state = self._stops.state(state, did)
            else:
                self._stops.state(state, None)
            if lag_ms > 2 * self._heartbeat_s * 1000:
                doing = thread_doing(self._owner, self._thread)
        sequence = int(now * 1000)
        for target in self._targets.values():
            heard_ms = NEVER_MS
            if target.heard_at is not None:
                heard_ms = int((now - target.heard_at) * 1000)
            target.send(HeartbeatFrame(state, doing, sequence, lag_ms, heard_ms))

    def _read(self) -> None:
        now = time.monotonic()
        for number, target in self._targets.items():
            heard_at = target.heard_at
            if target.datagrams is not None:
                target.read_datagrams(now)
            if not target.is_ended and not target.read(now):
                # The end of the connection is no verdict: the control link shows
                # whether the process has ended. The owner opens another connection;
                # until then, datagrams continue.
                target.is_ended = True
                self._unreported[number] = target
            if target.heard_at != heard_at:
                self._unreported[number] = target

    def _report(self) -> None:
        """Send new reports; for a slow owner, keep only each peer's latest report."""
        is_last = False
        while not is_last:
            numbers = list(self._unreported)[:REPORTS_A_MESSAGE]
            is_last = len(numbers) == len(self._unreported)
            message = b"".join(_report_of(n, self._unreported[n]) for n in numbers)
            message += REPORT.pack(END_OF_REPORT, 0, 0, 0, 0, 0.0) if is_last else b""
            try:
                self._control.send(message)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._is_over = True
                return
            for number in numbers:
                target = self._unreported.pop(number)
                if target is not None:
                    target.is_reported = target.is_ended

    def _handle_order(self) -> None:
        try:
            order, fds, _, _ = socket.recv_fds(self._control, _ORDER.size, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            order, fds = b"", []
        if len(order) != _ORDER.size:
            self._is_over = True
            return
        kind, number, out_key, in_key = _ORDER.unpack(order)
        if kind == ADD and not fds:
            # This process could not receive the socket: it has too many open files.
            self._unreported[number] = None
        elif kind == ADD:
            target = HeartbeatTarget(socket.socket(fileno=fds[0]), out_key, in_key)
            self._targets[number] = target
        elif kind == ADD_DATAGRAMS and fds and number in self._targets:
            self._targets[number].datagrams = socket.socket(fileno=fds[0])
        elif kind == REMOVE and number in self._targets:
            self._drop(number)
        else:
            for fd in fds:  # the sockets belong to a peer that could not be added
                os.close(fd)

    def _drop(self, number: int) -> None:
        target = self._targets.pop(number)
        self._unreported.pop(number, None)
        for sock in (target.sock, target.datagrams):
            if sock is not None:
                sock.close()


def _report_of(number: int, target: HeartbeatTarget | None) -> bytes:
    if target is None:
        return REPORT.pack(number, ENDED, 0, 0, 0, 0.0)
    heartbeat, at = target.latest, target.heard_at
    if heartbeat is None or at is None or (target.is_ended and not target.is_reported):
        return REPORT.pack(number, ENDED, 0, 0, 0, 0.0)
    return REPORT.pack(
        number,
        heartbeat.state,
        heartbeat.doing,
        heartbeat.lag_ms,
        heartbeat.heard_ms,
        at,
    )


def main() -> None:
    # Raise the limit now, because the owner may later raise its own and pass more
    # sockets.
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    control, memory, owner, thread = map(int, sys.argv[1:5])
    sock, heartbeat_s = socket.socket(fileno=control), float(sys.argv[5])
    sign = mmap.mmap(memory, SIGN.size)
    os.close(memory)
    HeartbeatHelper(sock, sign, owner, heartbeat_s, thread).run()


if __name__ == "__main__":
    main()
