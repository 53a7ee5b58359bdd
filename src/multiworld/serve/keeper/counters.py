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
    acked, waiting, _ = _settled(sock, BYTES_ACKED, SIOCOUTQ)
    return acked + waiting


def read(sock: socket.socket) -> int:
    """Return how many bytes this host has read from the connection."""
    received, waiting, state = _settled(sock, BYTES_RECEIVED, SIOCINQ)
    return received - waiting - (state in ENDED)


def _settled(sock: socket.socket, offset: int, queue: int) -> tuple[int, int, int]:
    # A packet may arrive between the calls: repeat until the counter is stable.
    for _ in range(TRIES):
        before, _ = _counter(sock, offset)
        (waiting,) = struct.unpack("i", fcntl.ioctl(sock, queue, b"\0" * 4))
        counter, state = _counter(sock, offset)
        if counter == before:
            break
    return counter, waiting, state


def _counter(sock: socket.socket, offset: int) -> tuple[int, int]:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    return struct.unpack_from("Q", info, offset)[0], info[0]
