"""Options of TCP connections. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any

TCP_THIN_LINEAR_TIMEOUTS = 16
TCP_RTO_MAX_MS = 44
"""Socket options of Linux that Python 3.11 has no names for."""

RETRANSMIT_MS = 1000
"""Longest pause before TCP tries again (from Linux 6.15 on; the shortest it allows). By
default the pauses double up to two minutes, and a connection stays silent for as long
again after the network is back."""

UNACKNOWLEDGED_MS = 15 * 60 * 1000
"""How long data may stay unacknowledged. About the kernel's default, which counts
retries, and would with short pauses come much earlier: who is lost is for liveness to
say, not for TCP."""


def persist(sock: socket.socket) -> None:
    """Let a TCP connection outlast a network that stalls, and wake up soon after."""
    options = (
        (TCP_THIN_LINEAR_TIMEOUTS, 1),
        (TCP_RTO_MAX_MS, RETRANSMIT_MS),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    )
    for option, value in options:
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


UNIX_BUFFER_BYTES = 1 << 20
"""Socket buffer on one host; Linux's default of 208 KiB makes a stream stop and go."""


def tune(sock: socket.socket) -> None:
    """Set a fresh connection's options: non-blocking, no delay, wide enough."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)


async def resolve(host: str, port: int) -> tuple[int, Any]:
    """Return family and socket address of ``host``; no look-up if it is a number.

    Raises:
        OSError: The name is unknown.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        loop = asyncio.get_running_loop()
        info = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return info[0][0], info[0][4]
    return (socket.AF_INET6 if version == 6 else socket.AF_INET), (host, port)
