"""The sockets of one Gloo world: finding them, and cutting them.

``ProcessGroupGloo.abort()`` releases nobody who waits. Shutting down a duplicate of the
world's connected sockets does, on both sides and within milliseconds. They are found by
address: Gloo publishes each member's listener through the store, and each world has a
listener of its own. The listener itself is never touched (that aborts the process).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

Where = tuple[str, int]

_MINIMUM = 28  # bytes of a sockaddr_in6


def parse_published(blob: bytes) -> Where:
    """Return the listener's address and port in what Gloo publishes.

    Layout (torch 2.13): length and bytes of the host's name, length and bytes of a
    ``sockaddr_storage``, then what does not matter here.

    Raises:
        ValueError: It has another layout.
    """
    try:
        (name,) = struct.unpack_from("=Q", blob, 0)
        (length,) = struct.unpack_from("=Q", blob, 8 + name)
        start = 16 + name
        if length < _MINIMUM or start + length > len(blob):
            raise ValueError("not an address that Gloo published")
        (family,) = struct.unpack_from("=H", blob, start)
        (port,) = struct.unpack_from("!H", blob, start + 2)
    except struct.error as error:
        raise ValueError("not an address that Gloo published") from error
    if family == socket.AF_INET:
        return socket.inet_ntop(family, blob[start + 4 : start + 8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, blob[start + 8 : start + 24]), port
    raise ValueError(f"Gloo published an address of family {family}")


def connected(own: Where, peers: set[Where]) -> Iterator[tuple[int, socket.socket]]:
    """Yield descriptor and a duplicate (for the caller to close) of each socket."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue  # closed meanwhile
        try:
            is_ours = _is_one_of(sock, own, peers)
        except OSError:
            is_ours = False
        if is_ours:
            yield fd, sock
        else:
            sock.close()


def _is_one_of(sock: socket.socket, own: Where, peers: set[Where]) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return sock.getsockname()[:2] == own or sock.getpeername()[:2] in peers


def cut(own: Where, peers: set[Where]) -> int:
    """Shut every connection of the world down; return how many there were."""
    count = 0
    for _, sock in connected(own, peers):
        with sock:
            try:
                sock.shutdown(socket.SHUT_RDWR)
                count += 1
            except OSError:
                pass
    return count
