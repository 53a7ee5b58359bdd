"""The events that a manager reports of its worlds: frozen values, past tense. Pure."""

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
    """Something that happened to one incarnation of a world."""

    world: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldReady(Event):
    """Every member has joined; traffic may flow."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLeft(Event):
    """A member left politely, behind all that it had sent."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberLost(Event):
    """A member was declared lost; ``WorldBroken`` follows."""

    rank: int
    reason: str
    evidence: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStalled(Event):
    """A member's process runs, but its event loop gives no sign; the world lives on.

    Attributes:
        rank: The member.
        stalled_s: For how long.
        evidence: What its loop's thread seems to do.
    """

    rank: int
    stalled_s: float
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberResumed(Event):
    """The event loop of a stalled member turns again."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWaiting(Event):
    """A process claims a rank of the next incarnation of a world that lives.

    ``World.grow`` (or ``reform``, if the world is broken) lets it in.

    Attributes:
        rank: The rank it claims.
        size: The world size it expects.
        is_gone: True if it has given up waiting.
    """

    rank: int
    size: int
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldBroken(Event):
    """The world is unusable; every pending operation of it has failed."""

    reason: str
    evidence: str
    lost: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldClosed(Event):
    """This process has left the world."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsDropped(Event):
    """This subscriber read too slowly: so many of the oldest events are gone."""

    count: int
