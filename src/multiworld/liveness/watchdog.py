"""The watchdog of a manager: detects lost peers (``FailureDetector``), and notifies
their worlds (``WorldTable``) over connections to peer managers (``LinkTable``)."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import time
from collections import Counter

from multiworld.config import HEARTBEAT_S
from multiworld.liveness import failure_detector as detector
from multiworld.liveness import heartbeat_helper
from multiworld.liveness.control_link import LinkKey, LocalLink
from multiworld.liveness.heartbeat import HeartbeatReport, Mode
from multiworld.liveness.link_table import LinkTable
from multiworld.liveness.manager_messages import LaneHello, WorldMessage
from multiworld.liveness.world_table import WorldPort, WorldTable
from multiworld.net.security import Security
from multiworld.net.streams import Stream
from multiworld.rendezvous.membership import (
    Address,
    Incarnation,
    Member,
    MemberUnreachableError,
)

__all__ = ["WatchDog"]

logger = logging.getLogger("multiworld.watchdog")

# Errors that this process causes, not a peer.
OWN_LACK = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN}

SILENT_S = 60.0  # seconds of silence after which a link that no world uses is closed


class WatchDog:
    """Watchdog of the peers of one manager's worlds; ``WorldManager`` makes it.

    Call its methods on the manager's event loop only.

    Args:
        uid: Unique name of the manager.
        is_enabled: Whether silent peers are declared lost; peers whose connection ended
            always are.
        mode: Kind of heartbeat helper: a process or a thread.
        heartbeat_s: Seconds between heartbeats.
        security: Secret and TLS; neither by default.
    """

    def __init__(
        self,
        uid: str,
        *,
        is_enabled: bool = True,
        mode: Mode = "process",
        heartbeat_s: float = HEARTBEAT_S,
        security: Security | None = None,
    ) -> None:
        self.uid = uid
        self.security = security or Security()
        self._is_enabled, self._heartbeat_s = is_enabled, heartbeat_s
        self._detector = detector.FailureDetector(heartbeat_s)
        self._worlds = WorldTable()
        self._links = LinkTable(
            uid, mode, heartbeat_s, self.security, self._worlds, self
        )
        self._keys: dict[str, LinkKey] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._is_closed = False

    # For worlds.

    def listen(self, host: str) -> Address:
        """Return the address at which this manager listens on an interface.

        Args:
            host: Address of the interface; "" for links inside this process only.
        """
        address = self._links.listen(host)
        if host:
            self._start_ticking()
        return address

    async def attach(
        self,
        incarnation: Incarnation,
        rank: int,
        port: WorldPort,
        limits: detector.DetectionLimits,
    ) -> None:
        """Connect to every other member of an incarnation, and watch it from now on.

        Raises ``MemberUnreachableError``. Cancellation: Safe; call ``detach`` then.

        Args:
            incarnation, rank: The admitted incarnation, and this manager's rank in it.
            port, limits: The receiver of messages and findings, and how long a member
                may be silent or stalled.
        """
        self._worlds.open(incarnation.nonce, port)
        loop = asyncio.get_running_loop()
        # Connect to all members concurrently, so that an unreachable one does not delay
        # the others.
        reaching = [
            loop.create_task(self._attach(incarnation, rank, member, limits))
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
        limits: detector.DetectionLimits,
    ) -> None:
        key = self._links.key_of(incarnation.members[rank], member)
        try:
            await self._links.connect(key, member)
        except OSError as error:
            if error.errno in OWN_LACK:
                raise
            raise MemberUnreachableError(member.rank, str(error)) from error
        link = self._links.link(key)
        if link is None:
            raise MemberUnreachableError(member.rank, "it ended while joining")
        self._worlds.add(incarnation.nonce, member.rank, key)
        is_judged = self._is_enabled and not isinstance(link, LocalLink)
        watched = limits if is_judged else detector.DetectionLimits(math.inf)
        self._observe(detector.Watched(_name(key), incarnation.nonce, watched))
        for message in self._worlds.early.take(incarnation.nonce, key):
            if key in self._links:
                self._worlds.message(key, message, time.monotonic())

    def linked(self, nonce: int) -> frozenset[int]:
        """Return the ranks of an incarnation that have a link.

        Args:
            nonce: The incarnation.
        """
        return self._worlds.ranks(nonce)

    def detach(self, nonce: int) -> None:
        """Stop watching for an incarnation, and drop its messages from now on.

        Args:
            nonce: The incarnation.
        """
        for key in self._worlds.remove(nonce):
            self._observe(detector.Unwatched(_name(key), nonce))

    def retire(self, nonce: int) -> None:
        """Refuse data for an incarnation that is broken; its messages still arrive.

        Args:
            nonce: The incarnation.
        """
        self._worlds.retire(nonce)

    def notify(self, rank: int, message: WorldMessage) -> None:
        """Send a control message to one member of its incarnation; never wait.

        Args:
            rank, message: The member, and the message for it.
        """
        key = self._worlds.link_of(message.nonce, rank)
        link = None if key is None else self._links.link(key)
        if link is not None:
            link.send(message)

    async def lane(
        self, incarnation: Incarnation, rank: int, peer: int, channel: str
    ) -> Stream:
        """Return a connection for data between two members; the caller owns it.

        Raises ``MemberUnreachableError``. Cancellation: Safe; nothing stays open.

        Args:
            incarnation, rank: The incarnation, and this manager's rank in it.
            peer, channel: Rank of the other member, and purpose of the connection.
        """
        member = incarnation.members[peer]
        if not self._links.dials(member):
            return await self._worlds.lanes.get((incarnation.nonce, peer, channel))
        hello = LaneHello(
            to_uid=member.uid, nonce=incarnation.nonce, rank=rank, channel=channel
        )
        try:
            return await self._links.reach(member.address, hello)
        except OSError as error:
            if error.errno in OWN_LACK:
                raise
            raise MemberUnreachableError(peer, str(error)) from error

    def has_lane(self, nonce: int, rank: int, channel: str) -> bool:
        """Return True if a connection that a member opened waits to be taken.

        Args:
            nonce, rank, channel: Incarnation, member, and purpose of the connection.
        """
        return self._worlds.lanes.has((nonce, rank, channel))

    def dials(self, member: Member) -> bool:
        """Return True if this manager dials ``member``, False if ``member`` dials.

        Args:
            member: The other member.
        """
        return self._links.dials(member)

    def silent_s(self, me: Member, member: Member) -> float:
        """Return the seconds since a member's process gave a sign.

        Args:
            me, member: This manager's member and another one of the same incarnation.
        """
        key = self._links.key_of(me, member)
        return self._detector.silent_s(_name(key), time.monotonic())

    @property
    def link_count(self) -> int:
        """Number of peer managers that have a link."""
        return len(self._links)

    @property
    def helper_pid(self) -> int | None:
        """Process ID of the heartbeat helper; None if it is a thread or not started."""
        return self._links.heartbeats.helper_pid

    @property
    def refused(self) -> Counter[str]:
        """Number of refused connections, by kind."""
        return self._links.refused

    def close_nowait(self, *, politely: bool = True) -> None:
        """End all links at once; safe to repeat.

        Args:
            politely: Announce to the peers that this is intended.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        self._worlds.lanes.close()
        self._links.close_nowait(politely=politely)

    async def close(self) -> None:
        """End all links gracefully and wait. Cancellation: The links end anyway."""
        self.close_nowait()
        await self._links.wait_closed()
        if self._ticker is not None:
            await asyncio.gather(self._ticker, return_exceptions=True)

    # Judging.

    def _start_ticking(self) -> None:
        if self._ticker is None and not self._is_closed:
            loop = asyncio.get_running_loop()
            self._ticker = loop.create_task(self._tick(), name="multiworld watchdog")

    async def _tick(self) -> None:
        """Run the failure detector while the manager lives, whatever errors occur."""
        while True:
            try:
                # Read the heartbeats that have arrived before judging.
                is_reported = await self._links.heartbeats.tick()
                self._observe(detector.Ticked() if is_reported else detector.Blinded())
                self._purge()
            except Exception:
                logger.exception("the watchdog continues after an error")
                self._observe(detector.Blinded())
                await asyncio.sleep(self._heartbeat_s)

    def _observe(self, observation: detector.Observation) -> None:
        for finding in self._detector.handle(observation, time.monotonic()):
            if (key := self._keys.get(finding.peer)) is None:
                continue
            try:
                self._worlds.finding(finding, key)
            except Exception:
                # An error in one world must not keep the others from being notified.
                logger.exception("world %x continues after an error", finding.world)

    def _purge(self) -> None:
        now = time.monotonic()
        self._worlds.purge(now)
        for key in self._links:
            # Close a silent link if no world uses it: its host may have vanished.
            silent_s = self._detector.silent_s(_name(key), now)
            since = self._links.without_heartbeats_since(key)
            is_silent = silent_s > SILENT_S and self._links.heartbeats.has(key)
            is_silent |= since is not None and now - since > SILENT_S
            if is_silent and not self._worlds.uses(key):
                self._links.give_up(key, "it has been silent", "no world needed it")

    # LinkTableOwner.

    def link_joined(self, key: LinkKey, *, has_heartbeats: bool) -> None:
        """Watch a new link.

        Args:
            key, has_heartbeats: The link, and whether it has a heartbeat connection.
        """
        self._keys[_name(key)] = key
        is_near = key.local_host == key.remote_host
        self._observe(detector.PeerJoined(_name(key), has_heartbeats, is_near))
        self._start_ticking()

    def heartbeats_began(self, key: LinkKey) -> None:
        """Watch a link for silence, too.

        Args:
            key: The link.
        """
        self._observe(detector.HeartbeatsBegan(_name(key)))

    def link_closed(self, key: LinkKey, reason: str, evidence: str) -> None:
        """Judge the peer whose link has ended.

        Args:
            key, reason, evidence: As for ``LinkOwner.link_ended``.
        """
        self._worlds.forget_link(key)
        self._observe(detector.PeerClosed(_name(key), reason, evidence))
        if key not in self._links:
            self._keys.pop(_name(key), None)

    def heard(self, key: LinkKey, report: HeartbeatReport) -> None:
        """Pass a heartbeat to the failure detector.

        Args:
            key, report: The link of the peer, and the heartbeat.
        """
        self._observe(
            detector.PeerHeard(
                peer=_name(key),
                at=report.at,
                state=detector.ProcessState(report.state),
                lag_s=report.lag_s,
                is_computing=report.doing == heartbeat_helper.COMPUTING,
                heard_us_s=report.heard_us_s,
            )
        )


def _name(key: LinkKey) -> str:
    return f"{key.peer}|{key.local_host}|{key.remote_host}"
