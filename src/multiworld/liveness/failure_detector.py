"""Failure detector: verdicts from heartbeats, silence and closed connections. Pure.

An observer that was late itself does not count its own delay as silence, and declares
no peer lost before it has read what arrived during the delay. A process that its helper
reports as stopped counts as silent. A process whose event loop does not respond is
*stalled*, which is a loss only after ``stalled_limit_s``.

Two intervals are added to every limit: when an outage begins, the last heartbeat may
be one interval old, and after its end, the next heartbeat may take another interval. A
heartbeat says how long ago its sender heard this process, so both sides detect a
one-way network partition.

If the helpers of all other processes on this host are silent while this process runs,
the host lacks memory or CPU time: each of these processes gets twice the time, until
its next heartbeat arrives.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

PeerKey = str
WorldKey = int


class ProcessState(enum.IntEnum):
    """State of a process, as its heartbeat helper sees it."""

    RUNNING = 0
    STOPPED = 1


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A control connection to a peer is up."""

    peer: PeerKey
    has_heartbeats: bool = True  # False: they start with ``HeartbeatsBegan``
    is_near: bool = False  # the peer runs on this host


@dataclass(frozen=True, slots=True)
class HeartbeatsBegan:
    """A peer's heartbeat connection is up: its silence counts from now on."""

    peer: PeerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHeard:
    """A heartbeat arrived."""

    peer: PeerKey
    at: float | None = None  # time of arrival, monotonic; None: now
    state: ProcessState = ProcessState.RUNNING
    lag_s: float = 0.0  # seconds since the peer's event loop last responded
    # True: the event loop's thread runs; False: it sleeps in a system call.
    is_computing: bool = False
    # Seconds since the peer last heard this process; None: never.
    heard_us_s: float | None = None


@dataclass(frozen=True, slots=True)
class PeerClosed:
    peer: PeerKey
    reason: str
    evidence: str


@dataclass(frozen=True, slots=True)
class DetectionLimits:
    """Limits of a world for a member, in seconds of silence."""

    silence_s: float
    # Report ``Stalled`` once the event loop has not responded for this long.
    stall_s: float = math.inf
    # Declare the peer lost once its event loop has not responded for this long.
    stalled_limit_s: float = math.inf

    def shortest_s(self) -> float:
        return min(self.silence_s, self.stall_s, self.stalled_limit_s)


@dataclass(frozen=True, slots=True)
class Watched:
    """A world has a member at the peer and must learn of its loss within ``limits``."""

    peer: PeerKey
    world: WorldKey
    limits: DetectionLimits


@dataclass(frozen=True, slots=True)
class Unwatched:
    peer: PeerKey
    world: WorldKey


@dataclass(frozen=True, slots=True)
class Ticked:
    """A tick, every ``tick_s`` seconds: the detector judges the peers."""


@dataclass(frozen=True, slots=True)
class Blinded:
    """A tick for which the received heartbeats could not be read."""


Observation = (
    PeerJoined
    | HeartbeatsBegan
    | PeerHeard
    | PeerClosed
    | Watched
    | Unwatched
    | Ticked
    | Blinded
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A peer is lost to a world; its last sign of life was ``silent_s`` ago."""

    peer: PeerKey
    world: WorldKey
    reason: str
    evidence: str
    silent_s: float
    has_ended: bool = False  # True if the peer's connection has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A peer's process runs, but its event loop does not respond. Not a verdict."""

    peer: PeerKey
    world: WorldKey
    stalled_s: float
    is_computing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    peer: PeerKey
    world: WorldKey


Finding = Verdict | Stalled | Resumed


@dataclass(frozen=True, slots=True)
class _Watch:
    """A world's limits for a peer. Silence before ``since`` does not count."""

    limits: DetectionLimits
    since: float


@dataclass(slots=True)
class _Peer:
    heard_at: float
    beat_at: float
    has_heartbeats: bool = True
    is_near: bool = False
    # The peer fell silent together with all other peers on this host.
    has_grace: bool = False
    state: ProcessState = ProcessState.RUNNING
    # Time at which the peer's event loop last responded; inf if that was recently.
    turned_at: float = math.inf
    is_computing: bool = False
    # Seconds for which the peer had not heard this process, by its last heartbeat.
    unheard_s: float = 0.0
    worlds: dict[WorldKey, _Watch] = field(default_factory=dict)
    stalled: set[WorldKey] = field(default_factory=set)
    shortest_s: float = math.inf


class FailureDetector:
    """Detector for all peers; its cost grows with the peers, not with the worlds."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s, self._margin_s = tick_s, 2 * tick_s
        self._peers: dict[PeerKey, _Peer] = {}
        self._ticked_at: float | None = None
        self._late_s = 0.0
        # Heartbeats before this time do not count for ``unheard_s``.
        self._fresh_from = -math.inf

    def handle(self, observation: Observation, now: float) -> list[Finding]:
        if self._ticked_at is None:
            self._ticked_at = now  # the first tick, too, may be late
        match observation:
            case PeerHeard():
                return self._heard(observation, now)
            case Ticked():
                last_at, self._ticked_at = self._ticked_at, now
                return self._tick(max(0.0, now - last_at - self._tick_s), now)
            case Blinded():
                last_at, self._ticked_at = self._ticked_at, now
                self._excuse(now - last_at, now)
            case PeerJoined(key, has_heartbeats, is_near):
                self._peers.setdefault(key, _Peer(now, now, has_heartbeats, is_near))
            case HeartbeatsBegan(key):
                self._heartbeats_began(key, now)
            case PeerClosed():
                return self._closed(observation, now)
            case Watched(key, world, limits):
                self._watch(key, world, limits, now)
            case Unwatched(key, world):
                self._unwatch(key, world)
        return []

    def silent_s(self, key: PeerKey, now: float) -> float:
        """Return the seconds since a peer was heard; 0 for an unknown peer."""
        peer = self._peers.get(key)
        if peer is None:
            return 0.0
        # The time after the previous tick does not count if this tick is overdue,
        # because messages that arrived since then are still unread.
        awake_until = math.inf if self._ticked_at is None else self._ticked_at
        return max(0.0, min(now, awake_until + self._margin_s) - peer.heard_at)

    def _heard(self, heard: PeerHeard, now: float) -> list[Finding]:
        peer = self._peers.get(heard.peer)
        if peer is None:
            return []
        peer.has_heartbeats = True
        at = now if heard.at is None else min(heard.at, now)
        peer.state = heard.state
        peer.beat_at = max(peer.beat_at, at)
        peer.has_grace = False
        if heard.state is ProcessState.RUNNING:
            peer.heard_at = max(peer.heard_at, at)
        # A stopped process is judged by its silence instead. Even a healthy event loop
        # appears to respond up to one ``tick_s`` late, because it gives a sign once per
        # tick.
        is_late = heard.state is ProcessState.RUNNING and heard.lag_s > self._margin_s
        peer.turned_at = at - heard.lag_s if is_late else math.inf
        peer.is_computing = heard.is_computing
        # After a pause of this process, the peer may not have received its new
        # heartbeats yet, so ignore what the peer reports about them.
        is_fresh = at > self._fresh_from
        unheard_s = (heard.heard_us_s or 0.0) if is_fresh else 0.0
        peer.unheard_s = max(0.0, unheard_s - self._margin_s)
        if is_late or not peer.stalled:
            return []
        resumed, peer.stalled = sorted(peer.stalled), set()
        return [Resumed(peer=heard.peer, world=world) for world in resumed]

    def _heartbeats_began(self, key: PeerKey, now: float) -> None:
        peer = self._peers.get(key)
        if peer is not None and not peer.has_heartbeats:
            peer.has_heartbeats, peer.heard_at, peer.beat_at = True, now, now

    def _watch(
        self, key: PeerKey, world: WorldKey, limits: DetectionLimits, now: float
    ) -> None:
        peer = self._peers.setdefault(key, _Peer(heard_at=now, beat_at=now))
        if not peer.worlds:
            # Nobody watched the peer until now, so it may have sent no heartbeats.
            peer.heard_at = peer.beat_at = now
            peer.turned_at, peer.unheard_s = math.inf, 0.0
        peer.worlds[world] = _Watch(limits, now)
        peer.shortest_s = min(peer.shortest_s, limits.shortest_s())

    def _unwatch(self, key: PeerKey, world: WorldKey) -> None:
        peer = self._peers.get(key)
        if peer is None:
            return
        peer.stalled.discard(world)
        watch = peer.worlds.pop(world, None)
        if watch is not None and watch.limits.shortest_s() <= peer.shortest_s:
            others = (other.limits.shortest_s() for other in peer.worlds.values())
            peer.shortest_s = min(others, default=math.inf)

    def _closed(self, closed: PeerClosed, now: float) -> list[Finding]:
        peer = self._peers.pop(closed.peer, None)
        if peer is None:
            return []
        return [
            Verdict(
                peer=closed.peer,
                world=world,
                reason=closed.reason,
                evidence=closed.evidence,
                silent_s=max(0.0, now - peer.heard_at),
                has_ended=True,
            )
            for world in peer.worlds
        ]

    def _tick(self, late_s: float, now: float) -> list[Finding]:
        before_s, self._late_s = self._late_s, late_s if late_s > self._tick_s else 0.0
        if self._late_s > 2 * before_s:
            # This process was paused; even a process that is always late may pause.
            self._excuse(late_s, now)
            return []
        # A process whose ticks are always late must still judge its peers. It has read
        # everything that arrived before its last tick, but perhaps not what arrived
        # since.
        findings: list[Finding] = []
        self._give_grace(now - late_s)
        for key, peer in self._peers.items():
            if not peer.has_heartbeats:
                # The heartbeat connection is still being opened, which ``join_s``
                # limits.
                peer.heard_at = peer.beat_at = now
                continue
            quiet_s = now - late_s - self._margin_s - min(peer.heard_at, peer.turned_at)
            if max(quiet_s, peer.unheard_s) > peer.shortest_s:
                findings += self._judge(key, peer, now - late_s)
        return findings

    def _give_grace(self, now: float) -> None:
        """Give this host's processes more time if several exist and all are silent."""
        peers = self._peers.values()
        near = [p for p in peers if p.is_near and p.worlds and p.has_heartbeats]
        if len(near) > 1 and all(now - p.beat_at > 2 * self._margin_s for p in near):
            for peer in near:
                peer.has_grace = True

    def _excuse(self, seconds: float, now: float) -> None:
        # During the pause, the peers may have missed this process's heartbeats. They
        # report that for a while, so ignore it.
        self._fresh_from = now + self._margin_s
        for peer in self._peers.values():
            peer.heard_at = min(now, peer.heard_at + seconds)
            peer.beat_at = min(now, peer.beat_at + seconds)
            peer.turned_at += seconds
            peer.unheard_s = 0.0

    def _judge(self, key: PeerKey, peer: _Peer, now: float) -> list[Finding]:
        findings: list[Finding] = []
        for world, watch in list(peer.worlds.items()):
            verdict = _verdict(key, peer, world, watch, now, self._margin_s)
            if verdict is not None:
                findings.append(verdict)
                self._unwatch(key, world)
            elif self._is_newly_stalled(peer, world, now):
                peer.stalled.add(world)
                stalled_s = now - peer.turned_at
                findings.append(
                    Stalled(
                        peer=key,
                        world=world,
                        stalled_s=stalled_s,
                        is_computing=peer.is_computing,
                    )
                )
        return findings

    def _is_newly_stalled(self, peer: _Peer, world: WorldKey, now: float) -> bool:
        stalled_s = now - peer.turned_at - self._margin_s
        return (
            stalled_s > peer.worlds[world].limits.stall_s and world not in peer.stalled
        )


def _verdict(
    key: PeerKey,
    peer: _Peer,
    world: WorldKey,
    watch: _Watch,
    now: float,
    margin_s: float,
) -> Verdict | None:
    limits = watch.limits
    silence_s = limits.silence_s * (2 if peer.has_grace else 1)
    silent_s, stalled_s = now - peer.heard_at, now - peer.turned_at
    known_s = now - watch.since - margin_s
    if min(silent_s - margin_s, known_s) > silence_s:
        limit_s = silence_s
        reason, evidence = _silence(peer, silent_s, now)
    elif min(peer.unheard_s - margin_s, known_s) > limits.silence_s:
        # Wait one margin longer: the side that hears nothing must be the first to
        # declare the loss.
        limit_s = limits.silence_s
        reason = f"it has not heard this process for over {peer.unheard_s:.1f} s"
        evidence = (
            "its heartbeats report it; the network is partitioned in one direction"
        )
    elif min(stalled_s - margin_s, known_s) > limits.stalled_limit_s:
        limit_s = limits.stalled_limit_s
        reason = f"its event loop has not run for {stalled_s:.1f} s"
        evidence = (
            f"its heartbeat helper reports it; {describe_thread(peer.is_computing)}"
        )
    else:
        return None
    return Verdict(
        peer=key,
        world=world,
        reason=reason,
        evidence=f"{evidence}; the limit is {limit_s:g} s",
        silent_s=max(0.0, silent_s),
    )


def _silence(peer: _Peer, silent_s: float, now: float) -> tuple[str, str]:
    if peer.state is ProcessState.STOPPED and now - peer.beat_at < silent_s:
        return (
            "its process is stopped (SIGSTOP or a debugger)",
            f"its heartbeat helper has reported it stopped for {silent_s:.1f} s",
        )
    return (
        f"it has been silent for {silent_s:.1f} s",
        "no heartbeat arrived"
        if peer.is_near
        else "no heartbeat arrived; its host or the network may be down",
    )


def describe_thread(is_computing: bool) -> str:
    if is_computing:
        return (
            "the thread of its event loop computes (a long call, which may hold the "
            "GIL)"
        )
    return "the thread of its event loop waits (a blocking call or a lock)"
