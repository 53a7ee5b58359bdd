"""Control links of a manager to its peers: listening, dialing, accepting. Two processes
have one link, however many worlds they share. The process with the smaller uid dials,
so that connections never cross."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from multiworld.liveness.control_link import Link, LinkKey, LocalLink, SocketLink
from multiworld.liveness.endpoint import Endpoint, address_here, reach
from multiworld.liveness.heartbeat import HeartbeatReport, Mode
from multiworld.liveness.heartbeat_links import HeartbeatLinks
from multiworld.liveness.manager_messages import (
    ControlMessage,
    DatagramsAt,
    HeartbeatHello,
    LaneHello,
    LinkHello,
    ManagerHello,
    ProbeHello,
    WorldMessage,
)
from multiworld.liveness.world_table import WorldTable
from multiworld.net.handshake import HandshakeError, refusal
from multiworld.net.handshake_messages import Hello
from multiworld.net.security import Security
from multiworld.net.streams import Stream
from multiworld.rendezvous.membership import Address, Member

logger = logging.getLogger("multiworld.watchdog")

# Seconds between probes of a peer that should dial this process: without probes, its
# death would be noticed only after ``join_s``.
PROBE_S = 1.0
# Timeout in seconds of one attempt to reopen a heartbeat connection. It is long,
# because the peer may be stopped.
AGAIN_LIMIT_S = 30.0
# Seconds to wait after each attempt to reopen a heartbeat connection.
AGAIN_S = (0.0, 0.2, 0.5, 1.0, 2.0)


class LinkTableOwner(Protocol):
    """Receiver of a link table's events."""

    def link_joined(self, key: LinkKey, *, has_heartbeats: bool) -> None:
        """Handle a new link; its heartbeat connection may come later."""

    def heartbeats_began(self, key: LinkKey) -> None:
        """Handle a link's heartbeat connection that came later."""

    def link_closed(self, key: LinkKey, reason: str, evidence: str) -> None:
        """Handle the end of a link; see ``LinkOwner.link_ended``."""

    def heard(self, key: LinkKey, report: HeartbeatReport) -> None:
        """Handle a heartbeat of a peer."""


@dataclass(slots=True)
class Peer:
    """A peer manager; ``address`` is where to dial it again, None if the peer dials."""

    link: Link
    seal: bytes = b""
    address: Address | None = None
    heartbeats: int = 1
    since: float = field(default_factory=time.monotonic)

    @property
    def is_local(self) -> bool:
        return isinstance(self.link, LocalLink)


# All tables in this process by uid. They link managers of the same process.
_tables: weakref.WeakValueDictionary[str, LinkTable] = weakref.WeakValueDictionary()


class LinkTable:
    hellos = ManagerHello

    def __init__(
        self,
        uid: str,
        mode: Mode,
        heartbeat_s: float,
        security: Security,
        worlds: WorldTable,
        owner: LinkTableOwner,
    ) -> None:
        self.uid, self._security = uid, security
        self._worlds, self._owner = worlds, owner
        self.heartbeats = HeartbeatLinks(
            mode, heartbeat_s, owner.heard, self._heartbeat_ended
        )
        self._endpoints: dict[str, Endpoint] = {}
        self._peers: dict[LinkKey, Peer] = {}
        self._awaited: dict[LinkKey, asyncio.Future[None]] = {}
        self._waiters: Counter[LinkKey] = Counter()
        self._linking: dict[LinkKey, asyncio.Task[None]] = {}
        # Tasks that dial only the heartbeat connection of a link.
        self._redialing: dict[LinkKey, asyncio.Task[None]] = {}
        self._is_closed = False
        _tables[uid] = self

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[LinkKey]:
        return iter(list(self._peers))

    def __contains__(self, key: LinkKey) -> bool:
        return key in self._peers

    def listen(self, host: str) -> Address:
        """Listen on ``host`` ("": inside this process only) and return the address."""
        self._check_open()
        if not host:
            return address_here("", 0, "")
        if host not in self._endpoints:
            self._endpoints[host] = Endpoint(host, self, self._security)
        return self._endpoints[host].address

    def key_of(self, me: Member, member: Member) -> LinkKey:
        return LinkKey(member.uid, me.address.host, member.address.host)

    def dials(self, member: Member) -> bool:
        """Return True if this manager dials ``member``, False if ``member`` dials."""
        return self.uid < member.uid

    def link(self, key: LinkKey) -> Link | None:
        peer = self._peers.get(key)
        return None if peer is None else peer.link

    def without_heartbeats_since(self, key: LinkKey) -> float | None:
        """Return when a link lost its heartbeat connection; None if it has one."""
        peer = self._peers[key]
        return None if peer.is_local or self.heartbeats.has(key) else peer.since

    @property
    def refused(self) -> Counter[str]:
        return sum((e.refused for e in self._endpoints.values()), Counter[str]())

    # Opening.

    async def connect(self, key: LinkKey, member: Member) -> None:
        """Open the link to a member's manager, or wait until that manager opens it."""
        self._check_open()
        if key in self._peers:
            return
        if not member.address.host:
            self._join_local(key, member)
        elif self.dials(member):
            await self._wait_for_dial(key, member.address)
        else:
            await self._wait_for_link(key, member)

    async def _wait_for_dial(self, key: LinkKey, address: Address) -> None:
        """Dial, or wait for a dial in progress; cancel dialing once no caller waits."""
        dialing = _once(self._linking, key, lambda: self._dial(key, address))
        self._waiters[key] += 1
        try:
            await asyncio.shield(dialing)
        finally:
            self._waiters[key] -= 1
            if not self._waiters[key]:
                del self._waiters[key]
                _unlink(self._linking, key, dialing)
                dialing.cancel()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("this manager was closed")

    async def reach(
        self, address: Address, hello: ManagerHello, security: Security | None = None
    ) -> Stream:
        """Connect to a manager, proving ``security`` (default: this manager's own)."""
        return await reach(address, hello, security or self._security)

    async def _wait_for_link(self, key: LinkKey, member: Member) -> None:
        """Wait for the peer to dial, probing whether it is alive."""
        loop = asyncio.get_running_loop()
        awaited = self._awaited.setdefault(key, loop.create_future())
        self._waiters[key] += 1
        try:
            while True:
                await asyncio.wait((awaited,), timeout=PROBE_S)
                if not awaited.done():
                    await self._probe(member, awaited)
                if awaited.done():
                    awaited.result()
                    return
        finally:
            self._waiters[key] -= 1
            if not self._waiters[key]:
                del self._waiters[key]
                if self._awaited.get(key) is awaited:
                    del self._awaited[key]  # the member did not open its link in time

    async def _probe(self, member: Member, awaited: asyncio.Future[None]) -> None:
        """Raise if a member cannot be reached; return early if its link arrives."""
        reaching = self.reach(member.address, ProbeHello(to_uid=member.uid))
        probe = asyncio.ensure_future(reaching)
        probe.add_done_callback(_forget_error)
        try:
            both: set[asyncio.Future[Any]] = {awaited, probe}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not awaited.done():
                probe.result()
        finally:
            probe.cancel()

    async def _dial(self, key: LinkKey, address: Address) -> None:
        fresh = secrets.token_hex(16)
        seal = self._seal_of(fresh)
        hello = LinkHello(
            uid=self.uid,
            to_uid=key.peer,
            host=key.local_host,
            to_host=key.remote_host,
            seal=fresh,
        )
        control = await self.reach(address, hello)
        try:
            sock = await self._dial_heartbeat(key, address, seal, number=1)
        except BaseException:
            control.close()
            raise
        peer = self._add(SocketLink(key, control, self), seal)
        peer.address = address
        try:
            self.heartbeats.begin(peer.link, sock, seal, dialed=True, number=1)
        except OSError as error:
            self.give_up(key, "no heartbeats can be exchanged", str(error))
            raise

    async def _dial_heartbeat(
        self, key: LinkKey, address: Address, seal: bytes, *, number: int
    ) -> socket.socket:
        # The secret of this handshake is the link's seal, so that no other process can
        # join the link.
        hello = HeartbeatHello(
            uid=self.uid,
            to_uid=key.peer,
            host=key.local_host,
            to_host=key.remote_host,
            number=number,
        )
        sock = await self.reach(address, hello, Security(secret=seal))
        assert isinstance(sock, socket.socket)
        return sock

    async def _dial_heartbeat_again(self, key: LinkKey) -> None:
        for pause_s in AGAIN_S:
            peer = self._peers.get(key)
            if peer is None or peer.address is None:
                return
            peer.heartbeats += 1
            number = peer.heartbeats
            try:
                async with asyncio.timeout(AGAIN_LIMIT_S):
                    sock = await self._dial_heartbeat(
                        key, peer.address, peer.seal, number=number
                    )
                if self._peers.get(key) is peer:
                    self.heartbeats.begin(
                        peer.link, sock, peer.seal, dialed=True, number=number
                    )
                else:
                    sock.close()
            except OSError as error:
                logger.info(
                    "the heartbeat connection to %s cannot be opened: %s",
                    key.peer,
                    error,
                )
                await asyncio.sleep(pause_s)
                continue
            return
        # No attempt succeeded, so end the link: without heartbeats, every world that
        # uses the link would break.
        evidence = "each attempt to open another one failed"
        self.give_up(key, "its heartbeat connection ended", evidence)

    def _heartbeat_ended(self, key: LinkKey) -> None:
        """Open another connection: a lost one does not mean a lost process."""
        peer = self._peers.get(key)
        if peer is not None:
            peer.since = time.monotonic()
        if peer is not None and peer.address is not None:
            _once(self._redialing, key, lambda: self._dial_heartbeat_again(key))

    def _seal_of(self, fresh: str) -> bytes:
        """Return the heartbeats' key; a secret or TLS keeps others from deriving it."""
        return bytes.fromhex(self._security.proof("beats", fresh))

    def _join_local(self, key: LinkKey, member: Member) -> None:
        other = _tables.get(member.uid)
        if other is None or other._is_closed:
            raise ConnectionRefusedError(f"{member} is not in this process")
        other_key = LinkKey(self.uid, key.remote_host, key.local_host)
        ours, theirs = LocalLink.pair(key, self, other_key, other)
        self._add(ours)
        other._add(theirs)

    def _add(
        self, link: Link, seal: bytes = b"", *, has_heartbeats: bool = True
    ) -> Peer:
        peer = self._peers[link.key] = Peer(link, seal)
        self._owner.link_joined(link.key, has_heartbeats=has_heartbeats)
        awaited = self._awaited.pop(link.key, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)
        return peer

    # Ending.

    def _drop(self, peer: Peer) -> None:
        peer.link.close()
        self.heartbeats.end(peer.link.key)

    def give_up(self, key: LinkKey, reason: str, evidence: str) -> None:
        """End a link as if it had been lost."""
        peer = self._peers.get(key)
        if peer is not None:
            self.link_ended(peer.link, reason, evidence)

    def close_nowait(self, *, politely: bool) -> None:
        self._is_closed = True
        _tables.pop(self.uid, None)
        for key in list(self._peers):
            peer = self._peers.pop(key)
            if politely:
                peer.link.say_bye()
            self._drop(peer)
        for awaited in self._awaited.values():
            awaited.cancel()
        for dialing in [*self._linking.values(), *self._redialing.values()]:
            dialing.cancel()
        for endpoint in self._endpoints.values():
            endpoint.close_nowait()
        self.heartbeats.close()

    async def wait_closed(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.close()

    # LinkOwner.

    def link_message(self, link: Link, message: ControlMessage) -> None:
        if isinstance(message, WorldMessage):
            self._worlds.message(link.key, message, time.monotonic())
        elif isinstance(message, DatagramsAt) and link.key in self._peers:
            self.heartbeats.datagrams_at(link.key, message)

    def link_ended(self, link: Link, reason: str, evidence: str) -> None:
        peer = self._peers.get(link.key)
        if peer is None or peer.link is not link:
            return
        del self._peers[link.key]
        self._drop(peer)
        if (redialing := self._redialing.pop(link.key, None)) is not None:
            redialing.cancel()
        self._owner.link_closed(link.key, reason, evidence)

    # Acceptor.

    def refusal(self, hello: Hello) -> str | None:
        if self._is_closed:
            return "this manager is closed"
        match hello:
            case LinkHello() | ProbeHello() | LaneHello() if hello.to_uid != self.uid:
                return f"this is manager {self.uid}, not {hello.to_uid}"
            case LaneHello(nonce=nonce, rank=rank):
                return self._worlds.lane_refusal(nonce, rank)
            case _:
                return None

    def security_for(self, hello: Hello) -> Security | None:
        """Return the link's seal for heartbeats, and None for other connections."""
        if not isinstance(hello, HeartbeatHello):
            return None
        peer = self._peers.get(_inbound_key(hello))
        if peer is None or not peer.seal:
            why = "no control link matches this heartbeat connection"
            raise HandshakeError("refused", why, answer=refusal(why))
        return Security(secret=peer.seal)

    def turned_away(self, hello: Hello, error: HandshakeError, where: object) -> None:
        """Ignore a refused connection, because nothing waits for it."""

    def take(self, sock: Stream, hello: Hello) -> None:
        match hello:
            case LaneHello(nonce=nonce, rank=rank, channel=channel):
                self._worlds.lanes.put((nonce, rank, channel), sock)
            case LinkHello():
                key = _inbound_key(hello)
                # The peer may have lost the old link and dialed again before this side
                # noticed the loss.
                self.give_up(key, "it replaced its control link", "it dialed again")
                link = SocketLink(key, sock, self)
                self._add(link, self._seal_of(hello.seal), has_heartbeats=False)
            case HeartbeatHello():
                assert isinstance(sock, socket.socket)
                peer = self._peers.get(_inbound_key(hello))
                if peer is None:  # the link ended during this handshake
                    sock.close()
                else:
                    self._begin_accepted(peer, sock, hello.number)
            case _:
                # A probe needs no more than the handshake, which has shown that this
                # manager is alive.
                sock.close()

    def _begin_accepted(self, peer: Peer, sock: socket.socket, number: int) -> None:
        try:
            self.heartbeats.begin(
                peer.link, sock, peer.seal, dialed=False, number=number
            )
        except OSError as error:
            # The peer sees that the connection ended, and dials again.
            logger.warning(
                "heartbeats with %s cannot start: %s", peer.link.key.peer, error
            )
            return
        self._owner.heartbeats_began(peer.link.key)


def _inbound_key(hello: LinkHello | HeartbeatHello) -> LinkKey:
    return LinkKey(hello.uid, hello.to_host, hello.host)


def _once(
    tasks: dict[LinkKey, asyncio.Task[None]],
    key: LinkKey,
    dial: Callable[[], Coroutine[Any, Any, None]],
) -> asyncio.Task[None]:
    """Dial in a separate task: cancelling one join must not end another's link."""
    if key not in tasks:
        loop = asyncio.get_running_loop()
        task = loop.create_task(dial(), name=f"multiworld dial {key.peer[:8]}")
        tasks[key] = task
        task.add_done_callback(functools.partial(_unlink, tasks, key))
        task.add_done_callback(_forget_error)
    return tasks[key]


def _unlink(
    tasks: dict[LinkKey, asyncio.Task[None]], key: LinkKey, task: asyncio.Task[None]
) -> None:
    if tasks.get(key) is task:
        del tasks[key]


def _forget_error(task: asyncio.Task[Any]) -> None:
    # Retrieve the error, so that asyncio does not log it: the callers have got it.
    _ = task.cancelled() or task.exception()
