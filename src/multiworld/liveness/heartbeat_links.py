"""Heartbeat connections to peers; connections to other hosts also have a UDP socket."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass

from multiworld.liveness import heartbeat_helper
from multiworld.liveness.control_link import Link, LinkKey
from multiworld.liveness.heartbeat import Heartbeat, HeartbeatReport, Mode
from multiworld.liveness.manager_messages import DatagramsAt
from multiworld.net.forks import closed_in_forks


@dataclass(slots=True)
class _Connection:
    """Heartbeat connection to one peer; ``handle`` is its number in ``Heartbeat``."""

    handle: int
    sock: socket.socket
    number: int
    # The UDP socket until the peer's port is known.
    datagrams: socket.socket | None = None


class HeartbeatLinks:
    """Heartbeat connections to all peers; the callbacks get the peer's link."""

    def __init__(
        self,
        mode: Mode,
        heartbeat_s: float,
        on_heard: Callable[[LinkKey, HeartbeatReport], None],
        on_ended: Callable[[LinkKey], None],
    ) -> None:
        self._mode, self._on_heard, self._on_ended = mode, on_heard, on_ended
        self._heartbeat = Heartbeat(self._take_report, heartbeat_s)
        self._connections: dict[LinkKey, _Connection] = {}
        self._keys: dict[int, LinkKey] = {}
        self._ports: dict[LinkKey, DatagramsAt] = {}

    @property
    def helper_pid(self) -> int | None:
        return self._heartbeat.helper_pid

    def has(self, key: LinkKey) -> bool:
        return key in self._connections

    def begin(
        self, link: Link, sock: socket.socket, seal: bytes, *, dialed: bool, number: int
    ) -> None:
        """Take over a new connection for heartbeats, and end the previous one."""
        key = link.key
        self._end_connection(key)
        # Each direction has its own key, so that a reflected frame is invalid.
        ends = [hmac.digest(seal, end, "sha256") for end in (b"dialer", b"acceptor")]
        ours, theirs = ends if dialed else reversed(ends)
        try:
            handle = self._heartbeat.add(sock, ours, theirs, self._mode)
        except OSError:
            sock.close()
            raise
        connection = self._connections[key] = _Connection(handle, sock, number)
        self._keys[handle] = key
        if sock.family != socket.AF_UNIX:
            connection.datagrams = _datagram_socket(key.local_host)
        if connection.datagrams is not None:
            port = connection.datagrams.getsockname()[1]
            link.send(DatagramsAt(port, number))
            self._join_datagrams(key)

    def datagrams_at(self, key: LinkKey, message: DatagramsAt) -> None:
        """Store the UDP port on which a peer takes heartbeats, if it is valid."""
        if 0 < message.port < 65536:
            self._ports[key] = message
            self._join_datagrams(key)

    def end(self, key: LinkKey) -> None:
        self._end_connection(key)
        self._ports.pop(key, None)

    def _end_connection(self, key: LinkKey) -> None:
        connection = self._connections.pop(key, None)
        if connection is None:
            return
        self._heartbeat.remove(connection.handle)
        self._keys.pop(connection.handle, None)
        connection.sock.close()
        if connection.datagrams is not None:
            connection.datagrams.close()

    def _join_datagrams(self, key: LinkKey) -> None:
        """Use UDP too, once both sides have sent their port for this connection."""
        connection, message = self._connections.get(key), self._ports.get(key)
        if connection is None or connection.datagrams is None or message is None:
            return
        if message.number != connection.number:
            # The message is e.g. about the previous connection.
            return
        if not _is_numeric(key.remote_host):
            return
        sock, connection.datagrams = connection.datagrams, None
        try:
            sock.connect((key.remote_host, message.port))
        except OSError:
            sock.close()
            return
        self._heartbeat.add_datagrams(connection.handle, sock)

    async def tick(self) -> bool:
        return await self._heartbeat.tick()

    def _take_report(self, number: int, report: HeartbeatReport) -> None:
        key = self._keys.get(number)
        if key is None:
            return
        if report.state == heartbeat_helper.ENDED:
            self._on_ended(key)
        else:
            self._on_heard(key, report)

    def close(self) -> None:
        for key in list(self._connections):
            self.end(key)
        self._heartbeat.close()


def _is_numeric(host: str) -> bool:
    """Return whether ``host`` is an IP address; looking up a name would block."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _datagram_socket(host: str) -> socket.socket | None:
    if not _is_numeric(host):
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = closed_in_forks(
        socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    )
    try:
        sock.bind((host, 0))
    except OSError:
        sock.close()
        return None
    return sock
