"""The watchdog: one control link per peer process, and who is lost. Shell.

However many worlds two processes share, they have one link, one pair of beats and one
account in ``FailureDetector``. It also carries the worlds' control messages and brings
in their data lanes: both arrive at the manager's one listener.

Of two managers, the one with the smaller uid dials; so no two connections ever cross.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from multiworld.liveness import heartbeat_helper
from multiworld.liveness.control_link import Link, LinkKey, LocalLink, SocketLink
from multiworld.liveness.early_messages import EarlyMessages
from multiworld.liveness.endpoint import Endpoint, dialing_filenos, reach
from multiworld.liveness.failure_detector import (
    Blinded,
    DetectionLimits,
    FailureDetector,
    Finding,
    PeerClosed,
    PeerHeard,
    PeerJoined,
    ProcessState,
    Ticked,
    Unwatched,
    Watched,
)
from multiworld.liveness.heartbeat import HeartbeatReport, Mode
from multiworld.liveness.heartbeat_links import HeartbeatLinks
from multiworld.liveness.pending_lanes import PendingLanes
from multiworld.net.handshake import HandshakeError, refusal
from multiworld.net.security import Security
from multiworld.net.streams import Stream
from multiworld.rendezvous.membership import (
    Address,
    Incarnation,
    Member,
    MemberUnreachableError,
    this_host,
)

__all__ = ["WatchDog"]

logger = logging.getLogger("multiworld.watchdog")

Message = dict[str, Any]

PROBE_S = 1.0
"""Seconds that the side which does not dial waits before it looks whether the other is
there at all; one that died between admission and dialing would cost all of join_s."""

AGAIN_S = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Pauses between attempts to make another connection for beats."""

SILENT_S = 60.0
"""Seconds of silence after which a link that no world uses is given up."""


RETIRED_LIMIT = 4096


class WorldPort(Protocol):
    """What the watchdog needs of a world."""

    def on_message(self, rank: int, message: Message) -> None:
        """A control message of a member arrived."""

    def on_finding(self, rank: int, finding: Finding) -> None:
        """Something was found out about a member's process."""


@dataclass(slots=True)
class _Peer:
    """One link, and what goes with it."""

    link: Link
    seal: bytes = b""
    address: Address | None = None
    """Where to dial it again, if this side dials."""
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
        self._liveness = FailureDetector(heartbeat_helper.BEAT_S)
        self._beats = HeartbeatLinks(mode, self._on_heard, self._beats_ended)
        self._endpoints: dict[str, Endpoint] = {}
        self._peers: dict[LinkKey, _Peer] = {}
        self._awaited: dict[LinkKey, asyncio.Future[None]] = {}
        self._linking: dict[LinkKey, asyncio.Task[None]] = {}
        self._worlds: dict[int, _Attached] = {}
        self._early = EarlyMessages[LinkKey, Message]()
        self._retired: deque[int] = deque(maxlen=RETIRED_LIMIT)
        self._lanes = PendingLanes()
        self._ticker: asyncio.Task[None] | None = None
        self._is_closed = False
        _watchdogs[uid] = self

    # What worlds use.

    def listen(self, host: str) -> Address:
        """Return where this manager listens on ``host``; "" is this process alone."""
        if not host:
            where = this_host()
            return Address(host="", port=0, unix="", boot=where.boot, netns=where.netns)
        if host not in self._endpoints:
            self._endpoints[host] = Endpoint.listen(host, self, self.security)
            self._start_ticking()
        return self._endpoints[host].address

    async def attach(
        self,
        incarnation: Incarnation,
        rank: int,
        port: WorldPort,
        limits: DetectionLimits,
    ) -> None:
        """Connect to every other member and watch it from now on.

        Raises:
            MemberUnreachableError: A member could not be reached.

        Cancellation: safe; call ``detach`` afterwards.
        """
        attached = self._worlds[incarnation.nonce] = _Attached(port, {})
        loop = asyncio.get_running_loop()
        # All at once: one that cannot be reached must not hide the others.
        reaching = [
            loop.create_task(self._attach(incarnation, rank, member, attached, limits))
            for member in incarnation.members
            if member.rank != rank
        ]
        try:
            await asyncio.gather(*reaching)
        finally:
            for task in reaching:
                task.cancel()
            await asyncio.gather(*reaching, return_exceptions=True)

    async def _attach(
        self,
        incarnation: Incarnation,
        rank: int,
        member: Member,
        attached: _Attached,
        limits: DetectionLimits,
    ) -> None:
        key = self._key(incarnation.members[rank], member)
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
        watched = limits if judged else DetectionLimits(math.inf)
        self._observe(Watched(_name(key), incarnation.nonce, watched))
        self._replay(incarnation.nonce, key)

    def linked(self, nonce: int) -> frozenset[int]:
        """Return the ranks that there is a link to, for an incarnation."""
        attached = self._worlds.get(nonce)
        return frozenset() if attached is None else frozenset(attached.peers)

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
        self._lanes.drop(nonce)

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
        return await self._lanes.get((incarnation.nonce, peer, channel))

    def has_lane(self, nonce: int, rank: int, channel: str) -> bool:
        """Tell whether a connection that a member opened waits to be taken."""
        return self._lanes.has((nonce, rank, channel))

    def dials(self, member: Member) -> bool:
        """Tell whether this manager dials ``member``, rather than waits for it."""
        return self.uid < member.uid

    def silent_s(self, me: Member, member: Member) -> float:
        """Return for how long a member has given no sign."""
        return self._liveness.silent_s(_name(self._key(me, member)), time.monotonic())

    @property
    def link_count(self) -> int:
        """How many peer managers there is a link to."""
        return len(self._peers)

    @property
    def helper_pid(self) -> int | None:
        """The process that beats for this one, if there is one."""
        return self._beats.helper_pid

    @property
    def refused(self) -> Counter[str]:
        """How many connections were refused, by kind."""
        return sum((e.refused for e in self._endpoints.values()), Counter[str]())

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        found = self._beats.filenos() + self._lanes.filenos() + dialing_filenos()
        for endpoint in self._endpoints.values():
            found += endpoint.filenos()
        for peer in self._peers.values():
            found += peer.link.filenos()
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
        self._lanes.close()
        for awaited in self._awaited.values():
            awaited.cancel()
        for linking in list(self._linking.values()):
            linking.cancel()
        for endpoint in self._endpoints.values():
            endpoint.close_nowait()
        self._beats.close()

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
            dialing = self._linked(key, lambda: self._dial(key, member.address))
            await asyncio.shield(dialing)
        else:
            await self._wait_for_link(key, member)

    def _linked(
        self, key: LinkKey, dial: Callable[[], Coroutine[Any, Any, None]]
    ) -> asyncio.Task[None]:
        """Dial in a task of our own: a join that is cancelled must not cut the link
        that another world has begun to use."""
        if key not in self._linking:
            loop = asyncio.get_running_loop()
            task = loop.create_task(dial(), name=f"multiworld dial {key.peer[:8]}")
            self._linking[key] = task
            task.add_done_callback(lambda _: self._linking.pop(key, None))
            task.add_done_callback(_forget_error)
        return self._linking[key]

    async def _wait_for_link(self, key: LinkKey, member: Member) -> None:
        """Wait for the other side to dial; look now and then whether it is there."""
        awaited = self._await_link(key)
        while True:
            done, _ = await asyncio.wait((awaited,), timeout=PROBE_S)
            if done:
                awaited.result()
                return
            await self._reach(member.address, {"kind": "probe", "to": member.uid})

    async def _dial(self, key: LinkKey, address: Address) -> None:
        fresh = secrets.token_hex(16)
        seal = self._seal_of(fresh)
        hello = {"kind": "link", "seal": fresh, **self._ends_of(key)}
        control = await self._reach(address, hello)
        try:
            beat = await self._dial_beats(key, address, seal)
        except BaseException:
            control.close()
            raise
        peer = self._add(SocketLink(key, control, self), seal)
        peer.address = address
        self._beats.begin(peer.link, beat, seal, dialed=True)

    async def _dial_beats(
        self, key: LinkKey, address: Address, seal: bytes
    ) -> socket.socket:
        # The link's seal is the secret: who does not hold it has no part in this link.
        hello = {"kind": "beat", **self._ends_of(key)}
        beat = await self._reach(address, hello, Security(secret=seal))
        assert isinstance(beat, socket.socket)
        return beat

    async def _dial_beats_again(self, key: LinkKey) -> None:
        for pause_s in AGAIN_S:
            peer = self._peers.get(key)
            if peer is None or peer.address is None:
                return
            try:
                beat = await self._dial_beats(key, peer.address, peer.seal)
            except OSError as error:
                logger.info("no connection for beats with %s: %s", key.peer, error)
                await asyncio.sleep(pause_s)
                continue
            if self._peers.get(key) is peer:
                self._beats.begin(peer.link, beat, peer.seal, dialed=True)
            else:
                beat.close()
            return

    def _ends_of(self, key: LinkKey) -> Message:
        hosts = {"from_host": key.local_host, "to_host": key.remote_host}
        return {"from": self.uid, "to": key.peer, **hosts}

    async def _reach(
        self, address: Address, hello: Message, security: Security | None = None
    ) -> Stream:
        return await reach(address, hello, security or self.security)

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
        self._start_ticking()
        return peer

    def _start_ticking(self) -> None:
        if self._ticker is None:
            loop = asyncio.get_running_loop()
            self._ticker = loop.create_task(self._tick(), name="multiworld watchdog")

    def _await_link(self, key: LinkKey) -> asyncio.Future[None]:
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().create_future()
        return self._awaited[key]

    def _drop(self, peer: _Peer) -> None:
        peer.link.close()
        self._beats.end(peer.link.key)

    # Beats.

    def _beats_ended(self, key: LinkKey) -> None:
        """Make another connection: its end alone says nothing about the process."""
        peer = self._peers.get(key)
        if peer is not None and peer.address is not None:
            self._linked(key, lambda: self._dial_beats_again(key))

    def _on_heard(self, key: LinkKey, report: HeartbeatReport) -> None:
        self._observe(
            PeerHeard(
                peer=_name(key),
                at=report.at,
                state=ProcessState(report.state),
                lag_s=report.lag_s,
                is_computing=report.doing == heartbeat_helper.COMPUTING,
                heard_us_s=report.heard_us_s,
            )
        )

    async def _tick(self) -> None:
        """Judge, for as long as the manager lives. A supervisor: whatever goes wrong
        in one turn must not end the watch."""
        while True:
            await asyncio.sleep(heartbeat_helper.BEAT_S)
            try:
                # What has arrived is read before anyone is judged, or nobody is.
                is_told = await self._beats.tick()
                self._observe(Ticked() if is_told else Blinded())
                self._purge()
            except Exception:
                logger.exception("the watchdog goes on after an error")
                self._observe(Blinded())

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
            if peer is not None and message.get("op") == "datagrams":
                self._beats.datagrams_at(link.key, message.get("port"))
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
        self._lanes.purge(self._worlds, now)
        for key, peer in list(self._peers.items()):
            # Nobody needs it, and its host may be gone without a word.
            silent_s = self._liveness.silent_s(_name(key), now)
            if not peer.worlds and silent_s > SILENT_S and self._beats.has(key):
                self.link_ended(peer.link, "it has been silent", "no world needed it")

    # Acceptor.

    def refusal(self, hello: Message) -> str | None:
        """Say why a connection is unwanted, or None."""
        if self._is_closed:
            return "this manager is closed"
        match hello["kind"]:
            case "link" if hello["to"] != self.uid:
                return f"this is manager {self.uid}, not {hello['to']}"
            case "probe" if hello["to"] != self.uid:
                return f"this is manager {self.uid}, not {hello['to']}"
            case "lane" if self._is_crowded(hello):
                return "too many lanes wait for incarnations that nobody knows"
            case "lane" if int(hello["nonce"]) in self._retired:
                return "that incarnation of the world is over"
            case "link" | "lane" | "beat" | "probe":
                return None
            case other:
                return f"unknown kind of connection {other!r}"

    def _is_crowded(self, hello: Message) -> bool:
        return int(hello["nonce"]) not in self._worlds and self._lanes.is_full

    def security_for(self, hello: Message) -> Security | None:
        """Beats show the seal of their link; everything else what all must."""
        if hello.get("kind") != "beat":
            return None
        peer = self._peers.get(self._inbound_key(hello))
        if peer is None or not peer.seal:
            why = "no control link to go with these beats"
            raise HandshakeError("refused", why, answer=refusal(why))
        return Security(secret=peer.seal)

    def turned_away(self, hello: Message, error: HandshakeError, where: object) -> None:
        """Nobody here waits for one who was refused."""

    def take(self, sock: Stream, hello: Message) -> None:
        """Own an accepted connection."""
        if hello["kind"] == "probe":
            sock.close()  # it only wanted to know whether this manager is there
            return
        if hello["kind"] == "lane":
            key = int(hello["nonce"]), int(hello["rank"]), str(hello["channel"])
            self._lanes.put(key, sock)
            return
        link = self._inbound_key(hello)
        if hello["kind"] == "link":
            if link in self._peers:  # it dialled anew before we saw the old one end
                old = self._peers[link].link
                self.link_ended(old, "it replaced its control link", "it dialled again")
            self._add(SocketLink(link, sock, self), self._seal_of(str(hello["seal"])))
        else:
            assert isinstance(sock, socket.socket)
            peer = self._peers[link]
            self._beats.begin(peer.link, sock, peer.seal, dialed=False)

    def _inbound_key(self, hello: Message) -> LinkKey:
        return LinkKey(
            str(hello["from"]), str(hello["to_host"]), str(hello["from_host"])
        )


def _forget_error(task: asyncio.Task[None]) -> None:
    _ = task.cancelled() or task.exception()  # who wanted to know has been told


def _name(key: LinkKey) -> str:
    return f"{key.peer}|{key.local_host}|{key.remote_host}"
