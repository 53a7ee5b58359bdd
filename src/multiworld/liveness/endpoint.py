"""A manager's listener, and the dialing of other managers. Control links, heartbeats
and lanes all arrive at one TCP port or, on one host, at one abstract Unix socket."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
from pathlib import Path

from multiworld.liveness.manager_messages import HeartbeatHello, ManagerHello
from multiworld.net.frames import FrameError
from multiworld.net.handshake import HandshakeError, dialing
from multiworld.net.listener import Acceptor, Listener, shake_hands
from multiworld.net.security import Security
from multiworld.net.streams import Stream, start_tls
from multiworld.net.tcp import connected, resolve
from multiworld.rendezvous.membership import Address

logger = logging.getLogger("multiworld.watchdog")

BACKLOG = 1024  # maximum number of connections in a listening socket's queue
# Seconds to wait before each new attempt to connect to an overloaded listener.
CROWDED_S = (0.05, 0.2, 0.5)

# Seconds of one connection attempt, and maximum number of attempts. During an outage
# the kernel waits up to a minute before it retries; a new attempt succeeds as soon as
# the network is back.
CONNECT_S, CONNECTS = 3.0, 40


@functools.cache
def _this_host() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, str(os.stat("/proc/self/ns/net").st_ino)


def address_here(host: str, port: int, unix: str) -> Address:
    """Return an address on this host."""
    boot, netns = _this_host()
    return Address(host=host, port=port, unix=unix, boot=boot, netns=netns)


async def dial(address: Address, hello: ManagerHello, security: Security) -> Stream:
    """Connect to a manager, perform the handshake and return the connection."""
    sock = await _connect(address)
    stream: Stream = sock
    try:
        # Heartbeat connections use no TLS: the heartbeat helper cannot speak it, and
        # each of their frames has an HMAC.
        if security.tls is not None and not isinstance(hello, HeartbeatHello):
            context = security.tls.context(is_server=False)
            stream = await start_tls(sock, context, is_server=False)
        await shake_hands(stream, dialing(hello, security))
        return stream
    except FrameError as error:
        stream.close()
        why = f"the peer does not speak the multiworld protocol: {error}"
        raise HandshakeError("malformed", why) from error
    except BaseException:
        stream.close()
        raise


async def reach(address: Address, hello: ManagerHello, security: Security) -> Stream:
    """Connect like ``dial``; retry if the listener is overloaded."""
    for pause_s in CROWDED_S:
        try:
            return await dial(address, hello, security)
        except (ConnectionResetError, BrokenPipeError):
            await asyncio.sleep(pause_s)
    return await dial(address, hello, security)


async def _connect(address: Address) -> socket.socket:
    if address.is_on(_this_host()):
        return await connected(socket.AF_UNIX, "\0" + address.unix)
    family, target = await resolve(address.host, address.port)
    for _ in range(CONNECTS):
        try:
            async with asyncio.timeout(CONNECT_S):
                return await connected(family, target)
        except TimeoutError:
            pass
    raise TimeoutError(f"no connection within {CONNECTS * CONNECT_S:g} s")


class Endpoint(Listener):
    """Listens on a free port of ``host`` and at a random Unix name."""

    def __init__(self, host: str, acceptor: Acceptor, security: Security) -> None:
        info = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        tcp = socket.create_server(info[0][4][:2], family=info[0][0], backlog=BACKLOG)
        tcp.setblocking(False)
        name = f"multiworld-{secrets.token_hex(12)}"
        try:
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.bind("\0" + name)
            unix.listen(BACKLOG)
        except OSError:
            tcp.close()
            raise
        unix.setblocking(False)
        self.address = address_here(host, tcp.getsockname()[1], name)
        what = f"the listener on {host}"
        super().__init__([tcp, unix], acceptor, security, logger, what)
