"""Who is alive: verdicts from beats, silence and closed connections. Pure.

One ``Liveness`` judges all peer processes of this one. Its cost grows with the number
of peers, never with the number of worlds shared with them: each peer keeps the shortest
deadline of its worlds, and only when that has passed are its worlds looked at.

Two rules keep it from crying wolf. An observer that was late itself (its own loop was
stuck, its machine was suspended) adds its delay to everybody's account and judges
nobody before it has read what arrived meanwhile. And a process that its helper reports
as stopped has not been *heard*, though beats keep coming.
"""

from __future__ import annotations

import enum
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


@dataclass(frozen=True, slots=True)
class PeerHeard:
    """A beat or a message arrived."""

    peer: PeerKey
    state: ProcessState = ProcessState.RUNNING


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The control connection ended; ``reason`` says how."""

    peer: PeerKey
    reason: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Watched:
    """A world shares the peer and wants to know of its loss after ``silence_s``."""

    peer: PeerKey
    world: WorldKey
    silence_s: float


@dataclass(frozen=True, slots=True)
class Unwatched:
    """A world no longer cares."""

    peer: PeerKey
    world: WorldKey


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time to judge; sent every ``tick_s``."""


Observation = PeerJoined | PeerHeard | PeerClosed | Watched | Unwatched | Ticked


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A peer is lost to a world."""

    peer: PeerKey
    world: WorldKey
    reason: str
    evidence: str
    silent_s: float


@dataclass(slots=True)
class _Peer:
    heard_at: float
    beat_at: float
    state: ProcessState = ProcessState.RUNNING
    worlds: dict[WorldKey, float] = field(default_factory=dict)
    shortest_s: float = float("inf")


class Liveness:
    """The account of every peer process."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._peers: dict[PeerKey, _Peer] = {}
        self._ticked_at: float | None = None
        self._was_late = False

    def handle(self, observation: Observation, now: float) -> list[Verdict]:
        """Take note of ``observation`` at ``now`` (monotonic seconds) and judge."""
        match observation:
            case PeerHeard(key, state):
                self._heard(key, state, now)
            case Ticked():
                return self._tick(now)
            case PeerJoined(key):
                self._peers.setdefault(key, _Peer(heard_at=now, beat_at=now))
            case PeerClosed():
                return self._closed(observation, now)
            case Watched(key, world, silence_s):
                self._watch(key, world, silence_s, now)
            case Unwatched(key, world):
                self._unwatch(key, world)
        return []

    def _heard(self, key: PeerKey, state: ProcessState, now: float) -> None:
        peer = self._peers.get(key)
        if peer is None:
            return
        peer.beat_at, peer.state = now, state
        if state is ProcessState.RUNNING:
            peer.heard_at = now

    def _watch(
        self, key: PeerKey, world: WorldKey, silence_s: float, now: float
    ) -> None:
        peer = self._peers.setdefault(key, _Peer(heard_at=now, beat_at=now))
        if not peer.worlds:  # nobody judged it until now, and it need not have beaten
            peer.heard_at = peer.beat_at = now
        peer.worlds[world] = silence_s
        peer.shortest_s = min(peer.shortest_s, silence_s)

    def _unwatch(self, key: PeerKey, world: WorldKey) -> None:
        peer = self._peers.get(key)
        if peer is None:
            return
        silence_s = peer.worlds.pop(world, None)
        if silence_s is not None and silence_s <= peer.shortest_s:
            peer.shortest_s = min(peer.worlds.values(), default=float("inf"))

    def _closed(self, closed: PeerClosed, now: float) -> list[Verdict]:
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

    def _tick(self, now: float) -> list[Verdict]:
        last, self._ticked_at = self._ticked_at, now
        late_s = 0.0 if last is None else max(0.0, now - last - self._tick_s)
        was_late, self._was_late = self._was_late, late_s > self._tick_s
        if self._was_late and not was_late:
            for peer in self._peers.values():
                peer.heard_at = min(now, peer.heard_at + late_s)
                peer.beat_at = min(now, peer.beat_at + late_s)
            return []
        # An observer that is late every time must judge all the same; what came since
        # its last tick may not be read yet, what came before that has been.
        verdicts: list[Verdict] = []
        for key, peer in self._peers.items():
            if now - late_s - peer.heard_at > peer.shortest_s:
                verdicts += self._silent(key, peer, now - late_s)
        return verdicts

    def _silent(self, key: PeerKey, peer: _Peer, now: float) -> list[Verdict]:
        silent_s = now - peer.heard_at
        if peer.state is ProcessState.STOPPED and now - peer.beat_at < silent_s:
            reason = "its process is stopped (SIGSTOP or a debugger)"
            evidence = f"its helper reports it stopped for {silent_s:.1f} s"
        else:
            reason = f"it has been silent for {silent_s:.1f} s"
            evidence = "no beat arrived; its host or the network may be gone"
        due = [world for world, limit in peer.worlds.items() if silent_s > limit]
        verdicts = [
            Verdict(
                peer=key,
                world=world,
                reason=reason,
                evidence=f"{evidence}; the limit is {peer.worlds[world]:g} s",
                silent_s=silent_s,
            )
            for world in due
        ]
        for world in due:
            self._unwatch(key, world)
        return verdicts
