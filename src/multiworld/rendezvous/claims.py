"""What a registry is told, and what it wants done. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiworld.rendezvous.reform import ReformClaim

SessionKey = int
RequestKey = int
Record = dict[str, Any]


# What can happen.


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A session claims a rank and waits for the other members."""

    session: SessionKey
    request: RequestKey
    world: str
    rank: int
    size: int
    terms: str
    uid: str
    seen: int
    deadline: float
    member: Record
    fresh_nonce: int
    place: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A session says what it holds: it was here before this registry was."""

    session: SessionKey
    world: str
    epoch: int
    rank: int
    uid: str


@dataclass(frozen=True, slots=True)
class Left:
    """A session no longer holds its rank in an incarnation.

    ``lost`` are the ranks that it knows to be lost: a word of one who was there, so
    that nobody has to wait for an answer of a dead host.
    """

    session: SessionKey
    world: str
    epoch: int
    rank: int
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A session gave up a claim that was still waiting."""

    session: SessionKey
    request: RequestKey


@dataclass(frozen=True, slots=True)
class Answered:
    """A holder answered whether it still holds its rank."""

    ask: int
    holds: bool


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session's connection is gone."""

    session: SessionKey


@dataclass(frozen=True, slots=True)
class Refused:
    """A stranger wanted into a world and could not be spoken with."""

    world: str
    error: Record


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time may have run out for someone."""


Happening = (
    Claimed
    | ReformClaim
    | Announced
    | Left
    | Withdrawn
    | Answered
    | SessionEnded
    | Refused
    | Ticked
)


# What is to be done.


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a claim."""

    session: SessionKey
    request: RequestKey
    body: Record


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Ask a holder whether it holds its rank."""

    session: SessionKey
    ask: int
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop every key of an incarnation that is no more."""

    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Tell a holder that a stranger waits for the next incarnation, or no longer."""

    session: SessionKey
    world: str
    epoch: int
    rank: int
    size: int
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Tell a holder that a member gave up in the instant of its admission."""

    session: SessionKey
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Keep the highest epoch of a name where a restart does not lose it."""

    world: str
    epoch: int


Action = Reply | AskHolder | Forget | Notify | Abandoned | Remember
