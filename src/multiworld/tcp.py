"""Options of TCP connections. Shell."""

from __future__ import annotations

import contextlib
import socket

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
