"""Socket options and name resolution of TCP connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any

from multiworld.net.forks import closed_in_forks
from multiworld.net.streams import Stream

TCP_THIN_LINEAR_TIMEOUTS = 16
TCP_RTO_MAX_MS = 44  # Linux's values, which Python 3.11 does not export

# Maximum milliseconds between retransmissions (from Linux 6.15 on). With the default of
# two minutes, a connection may stay silent for two more minutes after an outage. But
# once this maximum is reached, the kernel drops the unsent data of a process that has
# exited: a shorter maximum would lose data if the receiver is busy for a few seconds.
RETRANSMIT_MS = 30_000

# An address in another network that no host has (RFC 5737 reserves it for
# documentation).
ELSEWHERE = ("198.51.100.1", 9)


def persist(sock: socket.socket) -> None:
    """Let a TCP connection survive a network outage and resume soon after it.

    The connection ends after about five minutes without an answer (15 minutes before
    Linux 6.15), or earlier if the failure detector declares the member lost.
    ``TCP_USER_TIMEOUT`` is not set, because it would also end a connection whose
    receiver answers but stays full.
    """
    options = ((TCP_THIN_LINEAR_TIMEOUTS, 1), (TCP_RTO_MAX_MS, RETRANSMIT_MS))
    for option, value in options:
        with contextlib.suppress(OSError):  # an older kernel lacks the option
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


# Seconds without traffic before a probe, and between probes. The first value is for
# connections to a store, whose loss must be noticed. The second is for connections
# between members: probes keep routers from dropping an idle connection (their limits
# are usually 350 seconds or more).
KEEP_ALIVE_S, IDLE_S = 5, 60


def keep_alive(sock: Stream, probe_s: int = KEEP_ALIVE_S) -> None:
    """Send probes on a TCP connection that is hardly used, such as a store's."""
    # If the peer's machine was restarted, it rejects the first probe, which ends the
    # connection.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)


# Buffer size in bytes. With Linux's default of 208 KiB, a stream stalls again and
# again.
UNIX_BUFFER_BYTES = 1 << 20


def tune(sock: socket.socket) -> None:
    """Make a new connection non-blocking, without delay, and with large buffers."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        persist(sock)
        keep_alive(sock, IDLE_S)


# Seconds between attempts to connect to a Unix listener whose queue is full.
CROWDED_S = [min(0.5, 0.01 * 2**n) for n in range(60)]


async def connected(family: int, where: Any) -> socket.socket:
    """Return a new connection, tuned; cancelling closes it."""
    sock = closed_in_forks(socket.socket(family, socket.SOCK_STREAM))
    try:
        tune(sock)
        if family == socket.AF_UNIX:
            await _connect_unix(sock, where)
        else:
            await asyncio.get_running_loop().sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


async def _connect_unix(sock: socket.socket, where: Any) -> None:
    # EAGAIN means that the listener's queue is full. asyncio would take it for a
    # connection in progress, and return a socket that is not connected.
    for pause_s in CROWDED_S:
        try:
            sock.connect(where)
        except BlockingIOError:
            await asyncio.sleep(pause_s)
        else:
            return
    raise TimeoutError(f"the listener's queue was full for {sum(CROWDED_S):.0f} s")


async def resolve_all(host: str, port: int) -> list[tuple[int, Any]]:
    """Return the families and addresses of ``host``, in the order to try them."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        loop = asyncio.get_running_loop()
        try:
            info = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError as error:  # the name is not a valid host name
            raise OSError(f"{host[:80]!r} is not a host name: {error}") from error
        return [(family, where) for family, _, _, _, where in info]
    return [((socket.AF_INET6 if version == 6 else socket.AF_INET), (host, port))]


async def resolve(host: str, port: int) -> tuple[int, Any]:
    """Return the family and the first address of ``host``."""
    return (await resolve_all(host, port))[0]


def own_address() -> str:
    """Return this machine's address towards other networks, or loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)  # connecting a UDP socket sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
