"""Socket options and name resolution of TCP connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any

TCP_THIN_LINEAR_TIMEOUTS = 16
TCP_RTO_MAX_MS = 44
"""Linux socket options that Python 3.11 has no names for."""

RETRANSMIT_MS = 1000
"""Maximum milliseconds between TCP retransmissions: the smallest value that Linux
allows (from 6.15 on). By default the pauses double up to two minutes, so after an
outage a connection would stay silent for as long again as the outage lasted."""

UNACKNOWLEDGED_MS = 15 * 60 * 1000
"""Maximum milliseconds that data may stay unacknowledged: about the kernel's default.
The kernel counts retries and, with short pauses, would give up much earlier. But the
failure detector decides which peers are lost, not TCP."""


def persist(sock: socket.socket) -> None:
    """Let a TCP connection survive a network outage and resume soon after it."""
    options = (
        (TCP_THIN_LINEAR_TIMEOUTS, 1),
        (TCP_RTO_MAX_MS, RETRANSMIT_MS),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS),
    )
    for option, value in options:
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


UNIX_BUFFER_BYTES = 1 << 20
"""Bytes in each buffer of a Unix socket. Linux's default of 208 KiB is so small that a
stream keeps stopping."""


def tune(sock: socket.socket) -> None:
    """Make a new connection non-blocking, without delay, and with large buffers."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)


async def resolve(host: str, port: int) -> tuple[int, Any]:
    """Return the address family and socket address of ``host``. A numeric address needs
    no look-up. A cancelled look-up ends in its thread."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        loop = asyncio.get_running_loop()
        info = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return info[0][0], info[0][4]
    return (socket.AF_INET6 if version == 6 else socket.AF_INET), (host, port)
