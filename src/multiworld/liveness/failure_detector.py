"""Who is alive: verdicts from beats, silence and closed connections. Pure.

One ``FailureDetector`` judges all peer processes of this one. Its cost grows with the
number of peers, never with the number of worlds shared with them: each peer keeps the
shortest deadlines of its worlds, and its worlds are looked at only when one has passed.

Three rules keep it from crying wolf. An observer that was late itself (its own loop was
stuck, its machine was suspended) adds its delay to everybody's account and judges
nobody before it has read what arrived meanwhile. A process that its helper reports as
stopped has not been *heard*, though beats keep coming. And a process whose event loop
gives no sign is *stalled*, which is told and is no loss, unless a world says so.

A limit of silence is what the network may be away for: the last beat before it went may
be one beat old, and the first one after it came back may take another. So two beats are
added to every limit before a verdict.

A cut in one direction is seen on both sides: a beat says how long ago its sender heard
this process, so that one who still hears knows that nobody listens.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

PeerKey = str
WorldKey = int


class ProcessState(enum.IntEnum):
    """What a helper sees of the process it beats for."""

    RUNNING = 0
    STOPPED = 1


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A control connection to a peer is up."""

    peer: PeerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHeard:
    """A beat arrived.

    Attributes:
        at: When it arrived (monotonic seconds); None: now.
        state: The peer's process.
        lag_s: Seconds since the peer's event loop gave a sign.
        is_computing: Whether its loop's thread runs, rather than waits for something.
        heard_us_s: Seconds since the peer heard this process; None: not yet.
    """

    peer: PeerKey
    at: float | None = None
    state: ProcessState = ProcessState.RUNNING
    lag_s: float = 0.0
    is_computing: bool = False
    heard_us_s: float | None = None


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The control connection ended; ``reason`` says how."""

    peer: PeerKey
    reason: str
    evidence: str


@dataclass(frozen=True, slots=True)
class DetectionLimits:
    """When a world gives a member up, in seconds.

    Attributes:
        silence_s: Without a sign of life.
        stall_s: Its event loop gives no sign: ``Stalled`` is told.
        stalled_limit_s: The same, and it counts as lost.
    """

    silence_s: float
    stall_s: float = math.inf
    stalled_limit_s: float = math.inf

    def shortest_s(self) -> float:
        """Return the limit that is reached first."""
        return min(self.silence_s, self.stall_s, self.stalled_limit_s)


@dataclass(frozen=True, slots=True)
class Watched:
    """A world shares the peer and wants to know of its loss within ``limits``."""

    peer: PeerKey
    world: WorldKey
    limits: DetectionLimits


@dataclass(frozen=True, slots=True)
class Unwatched:
    """A world no longer cares."""

    peer: PeerKey
    world: WorldKey


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time to judge; sent every ``tick_s``."""


@dataclass(frozen=True, slots=True)
class Blinded:
    """Sent instead of ``Ticked``: what has arrived could not be looked at."""


Observation = (
    PeerJoined | PeerHeard | PeerClosed | Watched | Unwatched | Ticked | Blinded
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A peer is lost to a world."""

    peer: PeerKey
    world: WorldKey
    reason: str
    evidence: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """A peer lives, but its event loop gives no sign. No verdict."""

    peer: PeerKey
    world: WorldKey
    stalled_s: float
    is_computing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The event loop of a stalled peer turns again."""

    peer: PeerKey
    world: WorldKey


Finding = Verdict | Stalled | Resumed


@dataclass(frozen=True, slots=True)
class _Watch:
    """A world's interest in a peer. What was before it began counts for nothing."""

    limits: DetectionLimits
    since: float


@dataclass(slots=True)
class _Peer:
    heard_at: float
    beat_at: float
    state: ProcessState = ProcessState.RUNNING
    turned_at: float = math.inf  # when its loop last gave a sign; inf: it just did
    is_computing: bool = False
    unheard_s: float = 0.0  # for how long it had not heard us when it last beat
    worlds: dict[WorldKey, _Watch] = field(default_factory=dict)
    stalled: set[WorldKey] = field(default_factory=set)
    shortest_s: float = math.inf


class FailureDetector:
    """The account of every peer process."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s, self._room_s = tick_s, 2 * tick_s
        self._peers: dict[PeerKey, _Peer] = {}
        self._ticked_at: float | None = None
        self._was_late = False
        self._fresh_from = -math.inf  # what was said before counts for nothing

    def handle(self, observation: Observation, now: float) -> list[Finding]:
        """Take note of ``observation`` at ``now`` (monotonic seconds) and judge."""
        match observation:
            case PeerHeard():
                return self._heard(observation, now)
            case Ticked():
                return self._tick(now)
            case Blinded():
                last, self._ticked_at = self._ticked_at, now
                self._excuse(0.0 if last is None else now - last, now)
            case PeerJoined(key):
                self._peers.setdefault(key, _Peer(heard_at=now, beat_at=now))
            case PeerClosed():
                return self._closed(observation, now)
            case Watched(key, world, limits):
                self._watch(key, world, limits, now)
            case Unwatched(key, world):
                self._unwatch(key, world)
        return []

    def silent_s(self, key: PeerKey, now: float) -> float:
        """Return for how long a peer has not been heard; 0 for one unknown."""
        peer = self._peers.get(key)
        return 0.0 if peer is None else now - peer.heard_at

    def _heard(self, heard: PeerHeard, now: float) -> list[Finding]:
        peer = self._peers.get(heard.peer)
        if peer is None:
            return []
        at = now if heard.at is None else min(heard.at, now)
        peer.state = heard.state
        peer.beat_at = max(peer.beat_at, at)
        if heard.state is ProcessState.RUNNING:
            peer.heard_at = max(peer.heard_at, at)
        # A stopped process is a case of its own; and a beat every ``tick_s`` makes the
        # loop of a healthy one look up to that late.
        is_late = heard.state is ProcessState.RUNNING and heard.lag_s > self._room_s
        peer.turned_at = at - heard.lag_s if is_late else math.inf
        peer.is_computing = heard.is_computing
        # What it had not heard when it sent this may be under way.
        is_fresh = at > self._fresh_from
        unheard_s = (heard.heard_us_s or 0.0) if is_fresh else 0.0
        peer.unheard_s = max(0.0, unheard_s - self._room_s)
        if is_late or not peer.stalled:
            return []
        resumed, peer.stalled = sorted(peer.stalled), set()
        return [Resumed(peer=heard.peer, world=world) for world in resumed]

    def _watch(
        self, key: PeerKey, world: WorldKey, limits: DetectionLimits, now: float
    ) -> None:
        peer = self._peers.setdefault(key, _Peer(heard_at=now, beat_at=now))
        if not peer.worlds:  # nobody judged it until now, and it need not have beaten
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
            )
            for world in peer.worlds
        ]

    def _tick(self, now: float) -> list[Finding]:
        last, self._ticked_at = self._ticked_at, now
        late_s = 0.0 if last is None else max(0.0, now - last - self._tick_s)
        was_late, self._was_late = self._was_late, late_s > self._tick_s
        if self._was_late and not was_late:
            self._excuse(late_s, now)
            return []
        # An observer that is late every time must judge all the same; what came since
        # its last tick may not be read yet, what came before that has been.
        findings: list[Finding] = []
        for key, peer in self._peers.items():
            quiet_s = now - late_s - self._room_s - min(peer.heard_at, peer.turned_at)
            if max(quiet_s, peer.unheard_s) > peer.shortest_s:
                findings += self._judge(key, peer, now - late_s)
        return findings

    def _excuse(self, seconds: float, now: float) -> None:
        """Add the observer's own delay to everybody's account."""
        # Peers may have missed this process meanwhile, and say so for a while.
        self._fresh_from = now + self._room_s
        for peer in self._peers.values():
            peer.heard_at = min(now, peer.heard_at + seconds)
            peer.beat_at = min(now, peer.beat_at + seconds)
            peer.turned_at += seconds
            peer.unheard_s = 0.0

    def _judge(self, key: PeerKey, peer: _Peer, now: float) -> list[Finding]:
        findings: list[Finding] = []
        for world, watch in list(peer.worlds.items()):
            verdict = _verdict(key, peer, world, watch, now, self._room_s)
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
        stalled_s = now - peer.turned_at - self._room_s
        return (
            stalled_s > peer.worlds[world].limits.stall_s and world not in peer.stalled
        )


def _verdict(
    key: PeerKey,
    peer: _Peer,
    world: WorldKey,
    watch: _Watch,
    now: float,
    room_s: float,
) -> Verdict | None:
    limits = watch.limits
    silent_s, stalled_s = now - peer.heard_at, now - peer.turned_at
    known_s = now - watch.since - room_s
    if min(silent_s - room_s, known_s) > limits.silence_s:
        limit_s = limits.silence_s
        reason, evidence = _silence(peer, silent_s, now)
    elif min(peer.unheard_s - room_s, known_s) > limits.silence_s:
        # With more room than silence has: who hears nothing is to be the first to know.
        limit_s = limits.silence_s
        reason = f"it has not heard this process for over {peer.unheard_s:.1f} s"
        evidence = "its beats arrive and say so; the network is cut in one direction"
    elif min(stalled_s - room_s, known_s) > limits.stalled_limit_s:
        limit_s = limits.stalled_limit_s
        reason = f"its event loop has not turned for {stalled_s:.1f} s"
        evidence = f"its helper beats and says so; {doing(peer.is_computing)}"
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
            f"its helper reports it stopped for {silent_s:.1f} s",
        )
    return (
        f"it has been silent for {silent_s:.1f} s",
        "no beat arrived; its host or the network may be gone",
    )


def doing(is_computing: bool) -> str:
    """Say what the thread of a stalled event loop does."""
    if is_computing:
        return "its loop's thread computes (a long call, perhaps one holding the GIL)"
    return "its loop's thread waits (a blocking call, or a lock)"
