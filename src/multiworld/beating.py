"""The owner's side of the heartbeat: a helper process or thread. Shell."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Literal

from multiworld import heartbeat

logger = logging.getLogger("multiworld.watchdog")

Mode = Literal["process", "thread"]


class Heart:
    """Starts, feeds and replaces whoever beats for this process."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._mode: Mode = "process"
        self._sockets: dict[int, socket.socket] = {}
        self._keys = itertools.count(1)
        self._unsent: set[int] = set()

    @property
    def helper_pid(self) -> int | None:
        """The helper process, for messages and tests."""
        return None if self._process is None else self._process.pid

    def add(self, sock: socket.socket, mode: Mode) -> int:
        """Let beats go out on ``sock`` (the caller keeps and closes its own copy)."""
        if self._control is None:
            self._start(mode)
        key = next(self._keys)
        self._sockets[key] = sock
        self._pass(key, sock)
        return key

    def remove(self, key: int) -> None:
        """End the beats on a socket."""
        if self._sockets.pop(key, None) is not None:
            self._order(heartbeat.encode_order(heartbeat.REMOVE, key))

    def tick(self) -> None:
        """Give a sign that the event loop turns; replace a helper that died."""
        if self._control is None:
            return
        if self._process is not None and self._process.poll() is not None:
            logger.warning(
                "the heartbeat helper ended with %s; starting another",
                self._process.returncode,
            )
            self._restart()
        unsent, self._unsent = self._unsent, set()
        for key in unsent & self._sockets.keys():
            self._pass(key, self._sockets[key])
        self._order(heartbeat.encode_order(heartbeat.TICK))

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        return [] if self._control is None else [self._control.fileno()]

    def close(self) -> None:
        """End the helper; returns once it is gone."""
        self._sockets.clear()
        self._stop()

    def _restart(self) -> None:
        self._stop()
        self._start(self._mode)
        for key, sock in self._sockets.items():
            self._pass(key, sock)

    def _start(self, mode: Mode) -> None:
        self._mode = mode
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        if mode == "thread":
            beater = heartbeat.Beater(theirs, owner=None)
            self._thread = threading.Thread(
                target=beater.run, name="multiworld-heartbeat", daemon=True
            )
            self._thread.start()
            return
        # A session of its own: a Ctrl-C at the terminal is for the program, not for
        # its helper, which ends with it anyway.
        command = [sys.executable, "-I", "-S", "-E", heartbeat.__file__]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._thread is not None:
            self._thread.join(timeout=heartbeat.BEAT_S * 5)
            self._thread = None

    def _pass(self, key: int, sock: socket.socket) -> None:
        assert self._control is not None
        order = heartbeat.encode_order(heartbeat.ADD, key)
        try:
            socket.send_fds(self._control, [order], [sock.fileno()])
        except OSError:
            self._unsent.add(key)  # the helper is behind; the next tick tries again

    def _order(self, order: bytes) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(order)
