"""The watchdog: one control link per peer process, and who is lost. Shell.

However many worlds two processes share, they have one link, one pair of beats and one
account in ``Liveness``. The watchdog also carries the worlds' control messages and
brings their data lanes in, since both arrive at the manager's one listener.

Of two managers, the one with the smaller uid dials; so no two connections ever cross.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import secrets
import socket
import time
import weakref
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from multiworld import heartbeat
from multiworld.beating import Heart, Mode, Report
from multiworld.early import EarlyMessages
from multiworld.endpoint import Endpoint, dial
from multiworld.link import Link, LinkKey, LocalLink, SocketLink
from multiworld.liveness import (
    Finding,
    Limits,
    Liveness,
    PeerClosed,
    PeerHeard,
    PeerJoined,
    ProcessState,
    Ticked,
    Unwatched,
    Watched,
)
from multiworld.membership import Address, Incarnation, Member, this_host
from multiworld.security import Security
from multiworld.streams import Stream

__all__ = ["WatchDog"]

logger = logging.getLogger("multiworld.watchdog")

Message = dict[str, Any]

SILENT_S = 60.0
"""Seconds of silence after which a link that no world uses is given up."""

CROWDED_S = (0.05, 0.2, 0.5)
"""Pauses before another attempt with a listener that had too many at its door."""

LANE_S = 60.0
"""Seconds that a connection waits for an incarnation nobody here knows yet."""

RETIRED_LIMIT = 4096


class MemberUnreachableError(ConnectionError):
    """A member that was admitted could not be connected to."""

    def __init__(self, rank: int, why: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} could not be reached: {why}")


class WorldPort(Protocol):
    """What the watchdog needs of a world."""

    def on_message(self, rank: int, message: Message) -> None:
        """A control message of a member arrived."""

    def on_finding(self, rank: int, finding: Finding) -> None:
        """Something was found out about a member's process."""


@dataclass(slots=True)
class _Peer:
    """One link, and the beats that go with it."""

    link: Link
    seal: bytes = b""
    beat: socket.socket | None = None
    beat_number: int = 0
    datagrams: socket.socket | None = None
    """For beats beside the connection, until the peer says where it listens."""
    datagram_port: int = 0
    worlds: dict[int, int] = field(default_factory=dict)  # nonce -> rank


@dataclass(slots=True)
class _Attached:
    port: WorldPort
    peers: dict[int, LinkKey]  # rank -> link


_watchdogs: weakref.WeakValueDictionary[str, WatchDog] = weakref.WeakValueDictionary()
"""The watchdogs of this process, for links inside it."""


class WatchDog:
    """Watches the peers of one manager's worlds.

    Made by ``WorldManager``; programs read its ``statistics`` at most. Everything here
    runs on the manager's event loop.
    """

    def __init__(
        self,
        uid: str,
        *,
        is_enabled: bool = True,
        mode: Mode = "process",
        security: Security | None = None,
    ) -> None:
        self.uid = uid
        self.security = security or Security()
        self._is_enabled = is_enabled
        self._liveness = Liveness(heartbeat.BEAT_S)
        self._heart = Heart(self._on_report)
        self._beating: dict[int, str] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._peers: dict[LinkKey, _Peer] = {}
        self._awaited: dict[LinkKey, asyncio.Future[None]] = {}
        self._dialing: dict[LinkKey, asyncio.Lock] = {}
        self._worlds: dict[int, _Attached] = {}
        self._early = EarlyMessages[LinkKey, Message]()
        self._retired: deque[int] = deque(maxlen=RETIRED_LIMIT)
        self._lanes: dict[tuple[int, int, str], asyncio.Future[Stream]] = {}
        self._lanes_since: dict[tuple[int, int, str], float] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._is_closed = False
        self._mode = mode
        _watchdogs[uid] = self

    # What worlds use.

    def listen(self, host: str) -> Address:
        """Return where this manager listens on ``host``; "" is this process alone."""
        if not host:
            where = this_host()
            return Address(host="", port=0, unix="", boot=where.boot, netns=where.netns)
        if host not in self._endpoints:
            self._endpoints[host] = Endpoint.listen(host, self, self.security)
        return self._endpoints[host].address

    async def attach(
        self,
        incarnation: Incarnation,
        rank: int,
        port: WorldPort,
        limits: Limits,
    ) -> None:
        """Connect to every other member and watch it from now on.

        Raises:
            MemberUnreachableError: A member could not be reached.

        Cancellation: safe; call ``detach`` afterwards.
        """
        me = incarnation.members[rank]
        attached = _Attached(port, {})
        self._worlds[incarnation.nonce] = attached
        for member in incarnation.members:
            if member.rank == rank:
                continue
            key = self._key(me, member)
            try:
                await self._link(key, member)
            except OSError as error:
                raise MemberUnreachableError(member.rank, str(error)) from error
            peer = self._peers.get(key)
            if peer is None:
                raise MemberUnreachableError(member.rank, "it ended while joining")
            attached.peers[member.rank] = key
            peer.worlds[incarnation.nonce] = member.rank
            judged = self._is_enabled and not isinstance(peer.link, LocalLink)
            watched = limits if judged else Limits(math.inf)
            self._observe(Watched(_name(key), incarnation.nonce, watched))
            self._replay(incarnation.nonce, key)

    def detach(self, nonce: int) -> None:
        """Stop to watch for an incarnation; its messages are dropped from now on."""
        attached = self._worlds.pop(nonce, None)
        self.retire(nonce)
        if attached is None:
            return
        for key in attached.peers.values():
            peer = self._peers.get(key)
            if peer is not None:
                peer.worlds.pop(nonce, None)
            self._observe(Unwatched(_name(key), nonce))

    def retire(self, nonce: int) -> None:
        """Refuse data for an incarnation that is broken; its messages still arrive."""
        if nonce not in self._retired:
            self._retired.append(nonce)
        self._early.drop(nonce)
        for lane_key in [key for key in self._lanes if key[0] == nonce]:
            _discard(self._lanes.pop(lane_key))

    def tell(self, nonce: int, rank: int, message: Message) -> None:
        """Send a control message about an incarnation to one member; never waits."""
        attached = self._worlds.get(nonce)
        key = None if attached is None else attached.peers.get(rank)
        peer = None if key is None else self._peers.get(key)
        if peer is not None:
            peer.link.send({"nonce": nonce, **message})

    async def lane(
        self, incarnation: Incarnation, rank: int, peer: int, channel: str
    ) -> Stream:
        """Return a connection for data between two members of an incarnation.

        One side dials, the other waits for it: see the module.

        Raises:
            MemberUnreachableError: The member could not be reached.

        Cancellation: safe; nothing stays open.
        """
        member = incarnation.members[peer]
        if self.uid < member.uid:
            hello = {"kind": "lane", "nonce": incarnation.nonce, "rank": rank}
            try:
                hello["channel"] = channel
                return await self._reach(member.address, hello)
            except OSError as error:
                raise MemberUnreachableError(peer, str(error)) from error
        future = self._lane_future((incarnation.nonce, peer, channel))
        try:
            return await future
        except asyncio.CancelledError:
            _discard(future)
            raise
        finally:
            self._lanes.pop((incarnation.nonce, peer, channel), None)

    def has_lane(self, nonce: int, rank: int, channel: str) -> bool:
        """Tell whether a connection that a member opened waits to be taken."""
        future = self._lanes.get((nonce, rank, channel))
        return future is not None and future.done() and not future.cancelled()

    def dials(self, member: Member) -> bool:
        """Tell whether this manager dials ``member``, rather than waits for it."""
        return self.uid < member.uid

    @property
    def link_count(self) -> int:
        """How many peer managers there is a link to."""
        return len(self._peers)

    @property
    def helper_pid(self) -> int | None:
        """The process that beats for this one, if there is one."""
        return self._heart.helper_pid

    @property
    def refused(self) -> Counter[str]:
        """How many connections were refused, by kind."""
        return sum((e.refused for e in self._endpoints.values()), Counter[str]())

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        found = self._heart.filenos()
        for endpoint in self._endpoints.values():
            found += endpoint.filenos()
        for peer in self._peers.values():
            found += peer.link.filenos()
            own = (peer.beat, peer.datagrams)
            found += [sock.fileno() for sock in own if sock is not None]
        for lane in self._lanes.values():
            if lane.done() and not lane.cancelled():
                found.append(lane.result().fileno())
        return found

    def close_nowait(self, *, politely: bool = True) -> None:
        """End everything; ``politely`` tells the peers that it is meant."""
        if self._is_closed:
            return
        self._is_closed = True
        _watchdogs.pop(self.uid, None)
        if self._ticker is not None:
            self._ticker.cancel()
        for key in list(self._peers):
            peer = self._peers.pop(key)
            if politely:
                peer.link.say_bye()
            self._drop(peer)
        for lane in self._lanes.values():
            _discard(lane)
        for awaited in self._awaited.values():
            _discard(awaited)
        for endpoint in self._endpoints.values():
            endpoint.close_nowait()
        self._heart.close()

    async def close(self) -> None:
        """End everything, politely, and wait until it has ended."""
        self.close_nowait()
        for endpoint in self._endpoints.values():
            await endpoint.close()
        if self._ticker is not None:
            await asyncio.gather(self._ticker, return_exceptions=True)

    # Links.

    def _key(self, me: Member, member: Member) -> LinkKey:
        return LinkKey(member.uid, me.address.host, member.address.host)

    async def _link(self, key: LinkKey, member: Member) -> None:
        if key in self._peers:
            return
        if not member.address.host:
            self._join_local(key, member)
        elif self.dials(member):
            async with self._dialing.setdefault(key, asyncio.Lock()):
                if key not in self._peers:
                    await self._dial(key, member.address)
            self._dialing.pop(key, None)
        else:
            await asyncio.shield(self._await_link(key))

    async def _dial(self, key: LinkKey, address: Address) -> None:
        hello = {
            "from": self.uid,
            "to": key.peer,
            "from_host": key.local_host,
            "to_host": key.remote_host,
        }
        fresh = secrets.token_hex(16)
        seal = self._seal_of(fresh)
        link_hello = {"kind": "link", "seal": fresh, **hello}
        control = await self._reach(address, link_hello)
        try:
            beat_hello = {"kind": "beat", "proof": _beat_proof(seal), **hello}
            beat = await self._reach(address, beat_hello)
        except BaseException:
            control.close()
            raise
        assert isinstance(beat, socket.socket)
        self._take_beat(self._add(SocketLink(key, control, self), seal), beat)

    async def _reach(self, address: Address, hello: Message) -> Stream:
        """Dial; try again if the other side was too crowded to listen."""
        for pause_s in CROWDED_S:
            try:
                return await dial(address, hello, self.security)
            except ConnectionResetError:
                await asyncio.sleep(pause_s)
        return await dial(address, hello, self.security)

    def _seal_of(self, fresh: str) -> bytes:
        """Return the key that seals the beats of one link.

        With a secret, who saw the link's hello cannot make it; with TLS, nobody did.
        """
        return bytes.fromhex(self.security.proof("beats", fresh))

    def _join_local(self, key: LinkKey, member: Member) -> None:
        other = _watchdogs.get(member.uid)
        if other is None or other._is_closed:
            raise ConnectionRefusedError(f"{member} is not in this process")
        other_key = LinkKey(self.uid, key.remote_host, key.local_host)
        ours, theirs = LocalLink.pair(key, self, other_key, other)
        self._add(ours)
        other._add(theirs)

    def _add(self, link: Link, seal: bytes = b"") -> _Peer:
        peer = self._peers[link.key] = _Peer(link, seal)
        self._observe(PeerJoined(_name(link.key)))
        awaited = self._awaited.pop(link.key, None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)
        if self._ticker is None:
            loop = asyncio.get_running_loop()
            self._ticker = loop.create_task(self._tick(), name="multiworld watchdog")
        return peer

    def _await_link(self, key: LinkKey) -> asyncio.Future[None]:
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().create_future()
        return self._awaited[key]

    def _drop(self, peer: _Peer) -> None:
        peer.link.close()
        if peer.beat is not None:
            self._heart.remove(peer.beat_number)
            self._beating.pop(peer.beat_number, None)
            peer.beat.close()
            peer.beat = None
        if peer.datagrams is not None:
            peer.datagrams.close()
            peer.datagrams = None

    # Beats.

    def _take_beat(self, peer: _Peer, sock: socket.socket) -> None:
        peer.beat = sock
        # At once: the peer may watch this process before this one has come so far.
        peer.beat_number = self._heart.add(sock, peer.seal, self._mode)
        self._beating[peer.beat_number] = _name(peer.link.key)
        if sock.family != socket.AF_UNIX:
            peer.datagrams = _datagram_socket(peer.link.key.local_host)
        if peer.datagrams is not None:
            port = peer.datagrams.getsockname()[1]
            peer.link.send({"op": "datagrams", "port": port})
            self._join_datagrams(peer)

    def _join_datagrams(self, peer: _Peer) -> None:
        """Beat over UDP too, once both sides have said where they listen."""
        if peer.datagrams is None or not peer.datagram_port:
            return
        sock, peer.datagrams = peer.datagrams, None
        try:
            sock.connect((peer.link.key.remote_host, peer.datagram_port))
        except OSError:
            sock.close()
            return
        self._heart.add_datagrams(peer.beat_number, sock)

    def _on_report(self, number: int, report: Report) -> None:
        name = self._beating.get(number)
        if name is None:
            return
        self._observe(
            PeerHeard(
                peer=name,
                at=report.at,
                state=ProcessState(report.state),
                lag_s=report.lag_s,
                is_computing=report.doing == heartbeat.COMPUTING,
                heard_us_s=report.heard_us_s,
            )
        )

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(heartbeat.BEAT_S)
            await self._heart.tick()  # what has arrived is read before anyone is judged
            self._observe(Ticked())
            self._purge()

    def _observe(self, observation: Any) -> None:
        for finding in self._liveness.handle(observation, time.monotonic()):
            attached = self._worlds.get(finding.world)
            if attached is None:
                continue
            for rank, key in attached.peers.items():
                if _name(key) == finding.peer:
                    attached.port.on_finding(rank, finding)

    # LinkOwner.

    def link_message(self, link: Link, message: Message) -> None:
        """Hand a control message to its world, or keep it until that is known."""
        nonce = message.get("nonce")
        peer = self._peers.get(link.key)
        if not isinstance(nonce, int):
            port = message.get("port")
            if peer is not None and isinstance(port, int) and 0 < port < 65536:
                peer.datagram_port = port
                self._join_datagrams(peer)
            return
        rank = None if peer is None else peer.worlds.get(nonce)
        if rank is not None and nonce in self._worlds:
            self._worlds[nonce].port.on_message(rank, message)
        elif nonce not in self._retired:
            self._early.keep(nonce, link.key, message, time.monotonic())

    def link_ended(self, link: Link, reason: str, evidence: str) -> None:
        """Judge the peer whose link has ended."""
        peer = self._peers.get(link.key)
        if peer is None or peer.link is not link:
            return
        del self._peers[link.key]
        self._drop(peer)
        self._observe(PeerClosed(_name(link.key), reason, evidence))

    def _replay(self, nonce: int, key: LinkKey) -> None:
        for message in self._early.take(nonce, key):
            peer = self._peers.get(key)
            if peer is not None:
                self.link_message(peer.link, message)

    def _purge(self) -> None:
        now = time.monotonic()
        self._early.purge(now)
        for lane, since in list(self._lanes_since.items()):
            if lane not in self._lanes:
                del self._lanes_since[lane]
            elif lane[0] not in self._worlds and now - since > LANE_S:
                _discard(self._lanes.pop(lane))
        for key, peer in list(self._peers.items()):
            # Nobody needs it, and its host may be gone without a word.
            silent_s = self._liveness.silent_s(_name(key), now)
            if not peer.worlds and silent_s > SILENT_S and peer.beat is not None:
                self.link_ended(peer.link, "it has been silent", "no world needed it")

    # Acceptor.

    def refusal(self, hello: Message) -> str | None:
        """Say why a connection is unwanted, or None."""
        if self._is_closed:
            return "this manager is closed"
        match hello["kind"]:
            case "link" if hello["to"] != self.uid:
                return f"this is manager {self.uid}, not {hello['to']}"
            case "beat":
                return self._refuse_beat(hello)
            case "lane" if int(hello["nonce"]) in self._retired:
                return "that incarnation of the world is over"
            case "link" | "lane":
                return None
            case other:
                return f"unknown kind of connection {other!r}"

    def _refuse_beat(self, hello: Message) -> str | None:
        peer = self._peers.get(self._inbound_key(hello))
        if peer is None:
            return "no control link to go with these beats"
        if peer.beat is not None:
            return "these beats have a connection already"
        if not hmac.compare_digest(str(hello["proof"]), _beat_proof(peer.seal)):
            return "these beats do not belong to that control link"
        return None

    def take(self, sock: Stream, hello: Message) -> None:
        """Own an accepted connection."""
        if hello["kind"] == "lane":
            key = int(hello["nonce"]), int(hello["rank"]), str(hello["channel"])
            future = self._lane_future(key)
            if future.done():
                raise ValueError("that lane is there already")
            future.set_result(sock)
            return
        link = self._inbound_key(hello)
        if hello["kind"] == "link":
            if link in self._peers:  # it dialled anew before we saw the old one end
                old = self._peers[link].link
                self.link_ended(old, "it replaced its control link", "it dialled again")
            self._add(SocketLink(link, sock, self), self._seal_of(str(hello["seal"])))
        else:
            assert isinstance(sock, socket.socket)
            self._take_beat(self._peers[link], sock)

    def _inbound_key(self, hello: Message) -> LinkKey:
        return LinkKey(
            str(hello["from"]), str(hello["to_host"]), str(hello["from_host"])
        )

    def _lane_future(self, key: tuple[int, int, str]) -> asyncio.Future[Stream]:
        if key not in self._lanes:
            self._lanes[key] = asyncio.get_running_loop().create_future()
            self._lanes_since[key] = time.monotonic()
        return self._lanes[key]


def _beat_proof(seal: bytes) -> str:
    """Return what shows that a connection for beats belongs to a link."""
    return heartbeat.seal(b"beats", seal).hex()


def _name(key: LinkKey) -> str:
    return f"{key.peer}|{key.local_host}|{key.remote_host}"


def _datagram_socket(host: str) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        sock.bind((host, 0))
    except OSError:
        sock.close()
        return None
    return sock


def _discard(future: asyncio.Future[Any]) -> None:
    """Cancel a future, or close the connection that it holds."""
    if not future.done():
        future.cancel()
    elif not future.cancelled() and future.exception() is None:
        result = future.result()
        if result is not None:
            result.close()
