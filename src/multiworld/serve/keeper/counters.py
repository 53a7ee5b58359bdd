"""The kernel's counts of a TCP connection: bytes written, and bytes read."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios

SIOCOUTQ = termios.TIOCOUTQ  # bytes that the peer has not acknowledged
SIOCINQ = termios.FIONREAD  # bytes received and not read

# Offsets in ``struct tcp_info`` of Linux 4.2 and later, include/uapi/linux/tcp.h.
BYTES_ACKED, BYTES_RECEIVED = 120, 128
INFO_BYTES = 256

# States after the peer's FIN, which the kernel counts as a received byte: TIME_WAIT,
# CLOSE_WAIT, LAST_ACK and CLOSING of include/net/tcp_states.h.
ENDED = frozenset({6, 8, 9, 11})

TRIES = 1000  # maximum attempts to read consistent counters


def written(sock: socket.socket) -> int:
    """Return how many bytes this host has written to the connection."""
    return _settled(sock, BYTES_ACKED, SIOCOUTQ, 1)


def read(sock: socket.socket) -> int:
    """Return how many bytes this host has read from the connection."""
    found = _settled(sock, BYTES_RECEIVED, SIOCINQ, -1)
    return found - (_info(sock)[0] in ENDED)


def _settled(sock: socket.socket, offset: int, queue: int, sign: int) -> int:
    # A packet may arrive between the two calls: repeat until the counter is stable.
    for _ in range(TRIES):
        before = _counter(sock, offset)
        waiting = _queued(sock, queue)
        if _counter(sock, offset) == before:
            break
    return before + sign * waiting


def _counter(sock: socket.socket, offset: int) -> int:
    (found,) = struct.unpack_from("Q", _info(sock), offset)
    return int(found)


def _info(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)


def _queued(sock: socket.socket, request: int) -> int:
    (found,) = struct.unpack("i", fcntl.ioctl(sock, request, b"\0" * 4))
    return int(found)
