"""Events that a manager publishes about its worlds: frozen values, past tense. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Event",
    "EventsDropped",
    "MemberLeft",
    "MemberLost",
    "MemberResumed",
    "MemberStalled",
    "MemberWaiting",
    "WorldBroken",
    "WorldClosed",
    "WorldReady",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of the events of one incarnation of a world.

    Attributes:
        world: The world's name.
        epoch: The incarnation's epoch.
    """

    world: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReady(Event):
    """Every member has joined, and traffic may flow."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft(Event):
    """A member left gracefully, after sending everything it had queued."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost(Event):
    """A member was declared lost; ``WorldBroken`` follows.

    Attributes:
        rank: The member's rank.
        reason: What happened, in words.
        evidence: The observation that led to the verdict.
        silent_s: Seconds since the member's last sign of life.
    """

    rank: int
    reason: str
    evidence: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStalled(Event):
    """A member's event loop does not respond, but its process runs; no world breaks.

    Attributes:
        rank: The member's rank.
        stalled_s: Seconds since its event loop last responded.
        evidence: Observed state of that loop's thread.
    """

    rank: int
    stalled_s: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberResumed(Event):
    """The event loop of a stalled member runs again."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWaiting(Event):
    """A process claims a rank in the next incarnation of a living world.

    ``World.grow`` admits it (``reform``, if the world is broken).

    Attributes:
        rank: The rank it claims.
        size: The world size it expects.
        is_gone: True if it has stopped waiting.
    """

    rank: int
    size: int
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldBroken(Event):
    """The world is unusable; every pending operation on it has failed.

    Attributes:
        reason: What happened, in words.
        evidence: The observation that led to the verdict.
        lost: Ranks known to be lost.
    """

    reason: str
    evidence: str
    lost: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldClosed(Event):
    """This process has left the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped(Event):
    """This subscriber read too slowly and lost its oldest events.

    Attributes:
        count: Number of events lost.
    """

    count: int
