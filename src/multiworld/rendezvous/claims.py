"""Inputs and actions of the registry. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.rendezvous.reform import ReformClaim
from multiworld.rendezvous.store_messages import Claim, ClaimOutcome

SessionKey = int
RequestKey = int


# Happenings: the registry's inputs.


class Claimed(Claim, frozen=True, kw_only=True):
    """A session claims a rank and waits for the other members."""

    session: SessionKey
    deadline: float  # end of its wait, in seconds on the store's monotonic clock
    fresh_nonce: int  # of the incarnation, if this claim completes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """A session reports a rank that it has held since before this registry started."""

    session: SessionKey
    world: str
    epoch: int
    rank: int
    uid: str


@dataclass(frozen=True, slots=True)
class Left:
    """A session gives up its rank; the ranks that it knows to be lost are freed too."""

    session: SessionKey
    world: str
    epoch: int
    rank: int
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    session: SessionKey
    request: RequestKey


@dataclass(frozen=True, slots=True)
class Answered:
    """A holder answered whether it still holds its rank."""

    session: SessionKey
    ask: int
    holds: bool


@dataclass(frozen=True, slots=True)
class SessionEnded:
    session: SessionKey


@dataclass(frozen=True, slots=True)
class Refused:
    """A process that wanted to join a world was refused in the handshake."""

    world: str
    outcome: ClaimOutcome


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has advanced; deadlines must be checked."""


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


# Actions: the registry's outputs.


@dataclass(frozen=True, slots=True)
class Reply:
    session: SessionKey
    request: RequestKey
    outcome: ClaimOutcome


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Question to a holder: does it still hold its rank?"""

    session: SessionKey
    ask: int
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Deletion of every key of an incarnation that has ended."""

    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Notice to a holder: a newcomer waits for the next incarnation, or has stopped."""

    session: SessionKey
    world: str
    epoch: int
    rank: int
    size: int
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Notice to a holder: a member withdrew its claim during its admission."""

    session: SessionKey
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Durable storage of a name's highest epoch."""

    world: str
    epoch: int


Action = Reply | AskHolder | Forget | Notify | Abandoned | Remember
