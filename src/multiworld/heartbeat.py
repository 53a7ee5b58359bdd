"""Beats for a process from outside its GIL. Standard library only.

Run as a script by a helper process (``python -I -S -E heartbeat.py FD PID``) or as a
thread. The owner passes sockets over a control socket; every ``BEAT_S`` one frame goes
out on each: the state of the owner and the time since its event loop last gave a sign.
The helper ends with its owner: by the control socket's end, or when it is reparented
(a forked child of the owner may hold the control socket open).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time

BEAT_S = 0.2
"""Seconds between beats: ten in the default silence of 2 s, so that a few lost or late
ones mean nothing; five wake-ups a second cost less than 0.1 % of a core."""

FRAME = struct.Struct("<4sB3xII")
MAGIC = b"MWB1"
RUNNING, STOPPED, GONE = 0, 1, 2

ADD, REMOVE, TICK = b"A", b"R", b"T"
_KEY = struct.Struct("<cQ")


def encode_order(order: bytes, key: int = 0) -> bytes:
    """Return one message of the owner: ``ADD`` (a socket rides along), ``REMOVE``, or
    ``TICK`` (the owner's event loop turned)."""
    return _KEY.pack(order, key)


def encode_beat(state: int, sequence: int, lag_ms: int) -> bytes:
    """Return one beat."""
    return FRAME.pack(MAGIC, state, sequence & 0xFFFFFFFF, min(lag_ms, 0xFFFFFFFF))


def decode_beat(frame: bytes) -> tuple[int, int, int]:
    """Return state, sequence number and milliseconds since the loop's last sign.

    Raises:
        ValueError: It is no beat.
    """
    magic, state, sequence, lag_ms = FRAME.unpack(frame)
    if magic != MAGIC or state not in (RUNNING, STOPPED):
        raise ValueError("not a beat")
    return state, sequence, lag_ms


def process_state(pid: int) -> int:
    """Return what ``/proc`` says of ``pid``; running where it says nothing."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        return GONE if os.path.isdir("/proc/self") else RUNNING
    except OSError:
        return RUNNING
    if fields[0] in (b"T", b"t"):
        return STOPPED
    return GONE if fields[0] in (b"X", b"x") else RUNNING


class Target:
    """One socket that gets the beats; a slow reader gets fewer, never a torn one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._rest = b""

    def beat(self, frame: bytes) -> bool:
        """Send ``frame``, or the rest of the last one; False if the reader is gone."""
        frame = self._rest or frame
        try:
            sent = self._sock.send(frame)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        self._rest = frame[sent:]
        return True

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class Beater:
    """The helper's loop."""

    def __init__(self, control: socket.socket, owner: int | None) -> None:
        self._control, self._owner = control, owner
        self._targets: dict[int, Target] = {}
        self._sequence = 0
        self._ticked_at = time.monotonic()

    def run(self) -> None:
        """Beat until the owner ends."""
        due = time.monotonic() + BEAT_S
        while self._obey(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            if now < due:
                continue
            due = now + BEAT_S
            if not self._beat(now):
                break
        for target in self._targets.values():
            target.close()
        self._control.close()

    def _beat(self, now: float) -> bool:
        state = RUNNING
        if self._owner is not None:
            if os.getppid() != self._owner:
                return False
            state = process_state(self._owner)
        if state == GONE:
            return False
        self._sequence += 1
        lag_ms = int((now - self._ticked_at) * 1000)
        frame = encode_beat(state, self._sequence, lag_ms)
        for key, target in list(self._targets.items()):
            if not target.beat(frame):
                target.close()
                del self._targets[key]
        return True

    def _obey(self, wait_s: float) -> bool:
        if not select.select([self._control], [], [], wait_s)[0]:
            return True
        try:
            order, fds, _, _ = socket.recv_fds(self._control, _KEY.size, 1)
        except OSError:
            return False
        if len(order) != _KEY.size:
            return False
        kind, key = _KEY.unpack(order)
        if kind == ADD and fds:
            self._targets[key] = Target(socket.socket(fileno=fds[0]))
        elif kind == REMOVE and key in self._targets:
            self._targets.pop(key).close()
        elif kind == TICK:
            self._ticked_at = time.monotonic()
        return True


def main() -> None:
    """Run as the helper process."""
    control, owner = int(sys.argv[1]), int(sys.argv[2])
    Beater(socket.socket(fileno=control), owner).run()


if __name__ == "__main__":
    main()
