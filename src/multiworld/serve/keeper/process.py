"""The process of the stream keeper: sockets, clocks and signals around ``Keeper``.

The process imports neither torch nor an HTTP parser, and is started with ``python -m``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from multiworld.serve.keeper import counters, kill_notes
from multiworld.serve.keeper.channel import Channel, add_socket
from multiworld.serve.keeper.connection_record import record_of
from multiworld.serve.keeper.frames import (
    PROTOCOL,
    Entry,
    FrameError,
    Kind,
    entry,
    frame,
)
from multiworld.serve.keeper.keeper import (
    TICK_S,
    Action,
    Close,
    Counters,
    Give,
    Keeper,
    Kill,
    Refuse,
    Release,
    Say,
    Trim,
)
from multiworld.serve.machines.open_files import raise_limit
from multiworld.serve.machines.usage import is_stopped

MIB = 2**20
BACKLOG = 2048  # maximum connections that wait to be accepted
ACCEPTS = 64  # maximum connections accepted in one iteration of the event loop
OTHER_FILES = 256  # descriptors reserved for files other than client sockets
FULL_S = 0.1  # seconds until the next accept when no descriptors are left
END_S = 1.0  # seconds to wait for the exit of a killed gateway
REST_S = 0.03  # seconds to pause between reads from gateways; see ``Channel``
LOCK_S = 1.0  # seconds between checks of whether the service runs
LINGER_S = 0.5  # seconds for a refused client to read its refusal

READY = b"ready"  # line that a keeper prints once it listens
ALONE = 3  # exit after this many checks in a row that find no process of the service

COUNTS = struct.Struct("<5Q")  # ``Counts``, in the heartbeats to the supervisor

SUPERVISOR = b"supervisor"  # the supervisor's name in its ``HELLO``

LEFT = 72  # exit code of a keeper that was paused for too long

REFUSAL = b'{"error":"no gateway can answer now; retry later"}'
REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
    b"retry-after: 1\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
) % (len(REFUSAL), REFUSAL)


class KeeperProcess:
    """Carries out the actions that ``Keeper`` returns."""

    def __init__(
        self,
        listeners: list[socket.socket],
        silence_s: float,
        max_bytes: int,
        active: int,
        folder: Path,
    ) -> None:
        self.keeper = Keeper(silence_s, max_bytes, active)
        self._folder = folder
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()
        # Starts at the current time, because restored connections keep the numbers that
        # an earlier keeper gave them.
        self._connections = itertools.count(time.time_ns() >> 10)
        self._numbers = itertools.count(1)
        self._sockets: dict[int, socket.socket] = {}
        self._channels: dict[int, Channel] = {}
        self._processes: dict[int, int] = {}  # pidfds, because a pid may be reused
        self._pids: dict[int, int] = {}
        self._restoring: dict[int, list[Entry]] = {}
        self._supervisors: set[int] = set()
        self._discarded = memoryview(bytearray(64 * 1024))
        self._silence_s = silence_s
        self._ticked_at = self._loop.time()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_sockets = max(1, files - OTHER_FILES)

    # Listening.

    def listen(self) -> None:
        """Accept clients from now on."""
        for sock in self._listeners:
            self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._loop.add_reader(sock, self._accept, sock)

    def _pause(self, listener: socket.socket) -> None:
        """Stop accepting for ``FULL_S``; clients wait in the kernel's backlog."""
        self._loop.remove_reader(listener)
        self._loop.call_later(FULL_S, self._start, listener)

    def _add_listener(self, number: int) -> None:
        """Listen on a socket that a gateway or the supervisor has kept open."""
        if (sock := add_socket(number, self._listeners)) is not None:
            self._start(sock)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            if len(self._sockets) >= self._max_sockets:
                self._pause(listener)
                return
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptors are left, or the client is gone
                self._pause(listener)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = next(self._connections)
            self._sockets[number] = sock
            found = self._counters(number)
            self._carry_out(self.keeper.accepted(number, found, self._loop.time()))

    # Gateways.

    def joined(self, sock: socket.socket) -> None:
        """Open a channel to a process that has connected."""
        number = next(self._numbers)
        pid, _, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        try:
            self._processes[number] = os.pidfd_open(pid)
        except OSError:  # the process is gone
            sock.close()
            return

        self._pids[number] = pid

        def framed(entries: list[Entry], descriptors: deque[int]) -> None:
            self._framed(number, entries, descriptors)

        self._channels[number] = Channel(
            sock, framed, lambda: self._lost(number), REST_S
        )

    def _framed(
        self, number: int, entries: list[Entry], descriptors: deque[int]
    ) -> None:
        self._exit_if_left()
        now = self._loop.time()
        if number in self._supervisors:
            self._supervised(number, entries, descriptors)
            return
        if number not in self.keeper.gateways:
            first = entries[0]
            if first.kind is not Kind.HELLO or first.value != PROTOCOL:
                raise FrameError(f"first entry is not HELLO of version {PROTOCOL}")
            # If this keeper is lost, the receiver sends the listeners to the next one.
            for sock in self._listeners:
                self._send(number, [entry(Kind.LISTENER)], [sock.fileno()])
            if number not in self._channels:
                return  # the peer is gone
            if first.payload == SUPERVISOR:
                self._supervisors.add(number)
                self.keeper.begun(now)
                return
            self.keeper.joined(number, now)
        own = self._without_records(number, entries, descriptors, now)
        self._carry_out(self.keeper.said(number, own, now))

    def _find(self, number: int, asked: Entry) -> None:
        """Answer a stream look-up, after reading all gateways' pending frames."""
        for channel in list(self._channels.values()):
            channel.read_now()
        if number in self.keeper.gateways:
            now = self._loop.time()
            self._carry_out(self.keeper.said(number, [asked], now))

    def _supervised(
        self, number: int, entries: list[Entry], descriptors: deque[int]
    ) -> None:
        for each in entries:
            match each.kind:
                case Kind.LISTENER:
                    self._add_listener(descriptors.popleft())
                case Kind.AWAIT:
                    self.keeper.ending(each.value / 1000, self._loop.time())
                case Kind.BEAT:
                    self.keeper.active = max(1, each.value)
        counts = COUNTS.pack(*self.keeper.counts)
        self._send(number, [entry(Kind.BEAT, payload=counts)])

    def _without_records(
        self, number: int, entries: list[Entry], descriptors: deque[int], now: float
    ) -> Iterable[Entry]:
        """Handle listeners, restored connections and look-ups; yield other entries."""
        for each in entries:
            if each.kind is Kind.LISTENER:
                self._add_listener(descriptors.popleft())
            elif each.kind is Kind.CONNECTION:
                self._restoring[number] = [each]
                if not each.value:  # not detached, so it has a client
                    sock = socket.socket(fileno=descriptors.popleft())
                    self._sockets[each.connection] = sock
            elif each.kind is Kind.FIND:
                self._loop.call_soon(self._find, number, each)
            elif number in self._restoring:
                self._restoring[number].append(each)
                if each.kind is Kind.COMPLETE:
                    record = record_of(self._restoring.pop(number))
                    self.keeper.restored(number, record, now)
            else:
                yield each

    def _send(
        self, number: int, entries: Iterable[bytes], descriptors: Iterable[int] = ()
    ) -> None:
        channel = self._channels.get(number)
        if channel is not None:
            channel.send(frame(entries), list(descriptors))

    def _lost(self, number: int) -> None:
        """Kill a lost gateway that still has connections; hand over the connections."""
        self._exit_if_left()
        del self._channels[number]
        self._supervisors.discard(number)
        process = self._processes.pop(number)
        del self._pids[number]
        for each in self._restoring.pop(number, [])[:1]:
            self._close(each.connection)
        gateway = self.keeper.gateways.get(number)
        if gateway is not None and gateway.connections and not gateway.is_leaving:
            # The gateway may still run, but only one gateway may write to a connection.
            _kill(process)
            _await_end(process)
        os.close(process)
        if gateway is None:
            return
        found = {each: self._counters(each) for each in gateway.connections}
        self._carry_out(self.keeper.lost(number, found, self._loop.time()))

    def _counters(self, connection: int) -> Counters:
        sock = self._sockets.get(connection)
        if sock is None:  # a kept stream, which has no client
            return Counters(0, 0)
        return Counters(counters.written(sock), counters.read(sock))

    def _close(self, connection: int) -> None:
        sock = self._sockets.pop(connection, None)
        if sock is not None:
            sock.close()

    # Actions.

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Give(connection, gateway):
                    self._give(connection, gateway)
                case Refuse(connection):
                    if connection in self._sockets:
                        self._refuse(self._sockets.pop(connection))
                case Close(connection):
                    self._close(connection)
                case Trim(connection):
                    written = self._counters(connection).written
                    self.keeper.trimmed(connection, written)
                case Release(connection, stream):
                    found, now = self._counters(connection), self._loop.time()
                    self._carry_out(
                        self.keeper.released(connection, found, now, stream)
                    )
                case Kill(gateway):
                    self._note_kill(gateway)
                    _kill(self._processes[gateway])
                case Say(gateway, what):
                    self._send(gateway, [what])

    def _note_kill(self, gateway: int) -> None:
        pid = self._pids[gateway]
        silent_s = self._loop.time() - self.keeper.gateways[gateway].heard_at
        what = "was stopped" if is_stopped(pid) else "did not respond"
        why = f"it {what} for {silent_s:.1f} s, and the stream keeper killed it"
        kill_notes.leave(self._folder, pid, why)

    def _give(self, connection: int, gateway: int) -> None:
        channel = self._channels.get(gateway)
        if channel is None:
            return  # the gateway's loss is handled next
        record = self.keeper.records[connection]
        sock = self._sockets.get(connection)
        descriptors = [] if sock is None else [sock.fileno()]
        for data in record.frames():
            if not channel.send(data, descriptors):
                self._carry_out(self.keeper.undeliverable(connection))
                return
            descriptors = []

    def _refuse(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.send(REFUSED)
            sock.shutdown(socket.SHUT_WR)
        # Read what the client still sends: closing a socket with unread bytes resets
        # the connection, possibly before the client has read the refusal.
        self._loop.add_reader(sock, self._discard, sock)
        self._loop.call_later(LINGER_S, self._end_refused, sock)

    def _discard(self, sock: socket.socket) -> None:
        try:
            has_more = sock.recv_into(self._discarded) > 0
        except BlockingIOError:
            return
        except OSError:
            has_more = False
        if not has_more:
            self._end_refused(sock)

    def _end_refused(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._loop.remove_reader(sock)
            sock.close()

    async def end(self) -> None:
        """Refuse the clients that wait for a gateway."""
        self._carry_out(found := self.keeper.ended())
        if found:
            await asyncio.sleep(LINGER_S)

    @property
    def is_awaiting(self) -> bool:
        """True while connections wait for the next service."""
        until = self.keeper.awaited_until
        return until is not None and self._loop.time() < until

    def _exit_if_left(self) -> None:
        """Exit if this process was paused for longer than ``silence_s``.

        The gateways may have given up on this keeper meanwhile, so its records of their
        connections may be stale. If no gateway has connections, the keeper stays: no
        other process knows the connections that wait for a gateway.
        """
        was_paused = self._loop.time() - self._ticked_at > self._silence_s
        if was_paused and any(g.connections for g in self.keeper.gateways.values()):
            os._exit(LEFT)

    def tick(self) -> None:
        """Check gateways and waiting connections."""
        self._exit_if_left()
        self._ticked_at = self._loop.time()
        for number in list(self.keeper.waiting):
            if number in self._sockets and _has_gone(self._sockets[number]):
                self.keeper.gone(number)
                self._close(number)
        self._carry_out(self.keeper.ticked(self._loop.time(), self._computes))

    def _computes(self, number: int) -> bool:
        """Return whether a gateway computes, or waits for a core or for memory pages.

        Any thread counts: if the event loop waits for the GIL, another thread has it.
        """
        with contextlib.suppress(OSError, KeyError):
            for path in Path(f"/proc/{self._pids[number]}/task").glob("*/stat"):
                with contextlib.suppress(OSError):  # the thread has ended
                    state = path.read_bytes().rpartition(b")")[2].split()[0]
                    if state in (b"R", b"D"):  # proc(5)
                        return True
        return False


def _has_gone(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)


def _await_end(process: int) -> None:
    """Wait for the exit of a killed process, which closes its descriptors."""
    # A pidfd is readable after the exit. ``select`` rejects descriptors above 1023.
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    waiting.poll(1000 * END_S)


def _is_locked(path: Path) -> bool:
    """Return whether a process of the service holds a shared lock of ``path``."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # it is locked, or no descriptors are left
        return True
    return False


def _bind(own: socket.socket, path: Path) -> int:
    """Listen at ``path``, in place of an earlier keeper; return the path's inode."""
    # No longer than ``path``, because the kernel limits the length of a socket's path.
    first = path.with_name(f"k{os.getpid()}")
    first.unlink(missing_ok=True)
    own.bind(str(first))
    first.chmod(0o600)
    own.listen(BACKLOG)
    inode = first.stat().st_ino
    first.rename(path)
    return inode


def _is_replaced(path: Path, inode: int) -> bool:
    """Return whether another keeper listens at ``path``."""
    try:
        return path.stat().st_ino != inode
    except OSError:  # the folder is gone, or unreadable for now
        return False


async def run(args: argparse.Namespace, own: socket.socket, inode: int) -> None:
    """Run a keeper, to which gateways connect at ``own``.

    It ends at a signal, when another keeper replaces it, or when no process of the
    service is left.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    listeners = [socket.socket(fileno=number) for number in args.listener]
    folder = Path(args.socket).parent
    kill_notes.clear(folder)
    process = KeeperProcess(
        listeners, args.silence, args.memory * MIB, args.active, folder
    )

    def joined() -> None:
        try:
            process.joined(own.accept()[0])
        except BlockingIOError:
            pass
        except OSError:  # no descriptors are left
            loop.remove_reader(own)
            loop.call_later(FULL_S, loop.add_reader, own, joined)

    loop.add_reader(own, joined)
    process.listen()
    os.write(sys.stdout.fileno(), READY + b"\n")
    alone = 0
    looked_at = loop.time()
    while not ended.is_set() and alone < ALONE:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await ended.wait()
        process.tick()
        if _is_replaced(Path(args.socket), inode):
            # Gateways go to the other keeper, so this one must take no connections.
            break
        if args.alive and loop.time() - looked_at > LOCK_S:
            looked_at = loop.time()
            is_used = process.is_awaiting or _is_locked(Path(args.alive))
            alone = 0 if is_used else alone + 1
    await process.end()


def main() -> None:
    """Run a keeper with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="multiworld-keeper")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--listener", type=int, action="append", default=[])
    parser.add_argument("--silence", type=float, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--active", type=int, required=True)
    parser.add_argument("--alive", default="")
    args = parser.parse_args()
    raise_limit()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        inode = _bind(own, Path(args.socket))
        own.setblocking(False)
        asyncio.run(run(args, own, inode))


if __name__ == "__main__":
    main()
