"""Inputs and actions of the registry. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.rendezvous.reform import ReformClaim
from multiworld.rendezvous.store_messages import ClaimOutcome, SealedMember

SessionKey = int
RequestKey = int


# Happenings: the registry's inputs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A session claims a rank and waits for the other members.

    Attributes:
        session: The session that claims.
        request: Number of the request within the session.
        world: The world's name.
        rank: The rank it claims.
        size: The world size it asks for.
        terms: Options that all members must agree on, in words.
        uid: Name of its manager, unique for ever.
        seen: The highest epoch of this name that it has seen.
        deadline: End of its wait, in seconds on the store's monotonic clock.
        member: Its member record.
        fresh_nonce: Nonce of the incarnation if this claim completes it.
        place: Number of its store and count of stores; see ``registry``.
    """

    session: SessionKey
    request: RequestKey
    world: str
    rank: int
    size: int
    terms: str
    uid: str
    seen: int
    deadline: float
    member: SealedMember
    fresh_nonce: int
    place: tuple[int, int] = (0, 1)


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
    """A session no longer holds its rank in an incarnation.

    Attributes:
        session: The session.
        world: The world's name.
        epoch: The incarnation's epoch.
        rank: The rank that it held.
        lost: Ranks that it knows to be lost. The registry frees them at once, so that
            no claim has to wait for an answer from a dead host.
    """

    session: SessionKey
    world: str
    epoch: int
    rank: int
    lost: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A session withdrew a claim."""

    session: SessionKey
    request: RequestKey


@dataclass(frozen=True, slots=True)
class Answered:
    """A holder answered the question whether it still holds its rank."""

    session: SessionKey
    ask: int
    holds: bool


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The connection of a session has ended."""

    session: SessionKey


@dataclass(frozen=True, slots=True)
class Refused:
    """A process that wanted to join a world was refused in the handshake."""

    world: str
    outcome: ClaimOutcome


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has advanced: deadlines must be checked."""


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
    """Answer a claim."""

    session: SessionKey
    request: RequestKey
    outcome: ClaimOutcome


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Ask a holder whether it still holds its rank."""

    session: SessionKey
    ask: int
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete every key of an incarnation that has ended."""

    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """Tell a holder that a newcomer waits for the next incarnation, or has stopped."""

    session: SessionKey
    world: str
    epoch: int
    rank: int
    size: int
    is_gone: bool


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Tell a holder that a member withdrew its claim while it was being admitted."""

    session: SessionKey
    world: str
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Store the highest epoch of a name durably."""

    world: str
    epoch: int


Action = Reply | AskHolder | Forget | Notify | Abandoned | Remember
