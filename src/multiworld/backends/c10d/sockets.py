"""Sockets of one Gloo world: finding them and shutting them down.

``ProcessGroupGloo.abort()`` releases no waiter; shutting down duplicates of its sockets
does, on both sides. The addresses of the members' listeners, which Gloo publishes in
the store, identify the sockets. The listener itself is never shut down, because that
would abort the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator

from multiworld.net.tcp import persist

SocketAddress = tuple[str, int]

# Minimum bytes of a published socket address: those of a ``sockaddr_in6``.
_MINIMUM = 28


def parse_published(blob: bytes) -> SocketAddress:
    """Return the listener's address and port in a value that Gloo published."""
    # Layout (torch 2.13): length and bytes of the host's name, length and bytes of a
    # ``sockaddr_storage``, then fields that are not needed here.
    try:
        (name,) = struct.unpack_from("=Q", blob, 0)
        (length,) = struct.unpack_from("=Q", blob, 8 + name)
        start = 16 + name
        if length < _MINIMUM or start + length > len(blob):
            raise ValueError("the published value holds no valid Gloo address")
        (family,) = struct.unpack_from("=H", blob, start)
        (port,) = struct.unpack_from("!H", blob, start + 2)
    except struct.error as error:
        raise ValueError("the published value holds no valid Gloo address") from error
    if family == socket.AF_INET:
        return socket.inet_ntop(family, blob[start + 4 : start + 8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, blob[start + 8 : start + 24]), port
    raise ValueError(f"Gloo published an address of family {family}")


def _dup(fd: int) -> int:
    """Return a duplicate, or the descriptor itself at the limit of open files."""
    try:
        return os.dup(fd)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return fd


class Connections:
    """Connected sockets of one world, found once, when all members are connected."""

    def __init__(self, own: SocketAddress, peers: set[SocketAddress]) -> None:
        # Addresses of this member's listener, and of the other members' listeners.
        self._own, self._peers = own, peers
        # Gloo makes all connections at the start and none later, so the list is
        # complete. Each descriptor is checked before every use: another file may have
        # reused its number.
        self._fds = [int(name) for name in os.listdir("/proc/self/fd")]
        self._fds = self.filenos()
        for _, sock in self._open():
            persist(sock)

    def filenos(self) -> list[int]:
        """Return the descriptors that are still connections of this world."""
        return [fd for fd, _ in self._open()]

    def cut(self) -> None:
        """Shut down every connection."""
        for _, sock in self._open():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _open(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield each descriptor with its socket, a duplicate, closed afterwards.

        At the limit of open files, the socket is the descriptor's own, and stays open.
        """
        for fd in self._fds:
            sock = self._duplicate(fd)
            if sock is None:
                continue
            try:
                yield fd, sock
            finally:
                if sock.fileno() == fd:
                    sock.detach()
                sock.close()

    def _duplicate(self, fd: int) -> socket.socket | None:
        """Return a duplicate of a descriptor if it is a connection of this world."""
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                return None
            sock = socket.socket(fileno=_dup(fd))
        except OSError:
            return None  # the descriptor was closed in the meantime
        try:
            if self._is_ours(sock):
                return sock
        except OSError:
            pass
        if sock.fileno() == fd:
            sock.detach()
        sock.close()
        return None

    def _is_ours(self, sock: socket.socket) -> bool:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return sock.getsockname()[:2] == self._own or (
            sock.getpeername()[:2] in self._peers
        )
