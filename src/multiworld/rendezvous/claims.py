"""Inputs and actions of the registry. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.rendezvous.reform import ReformClaim
from multiworld.rendezvous.store_messages import (
    Announce,
    Claim,
    ClaimOutcome,
    HoldsAnswer,
    Leave,
    StoreMessage,
    Withdraw,
)

SessionKey = int
RequestKey = int


# Happenings: the registry's inputs.


class Claimed(Claim, frozen=True, kw_only=True):
    """A session claims a rank and waits for the other members."""

    session: SessionKey
    # Time at which the claim stops waiting, in seconds of the store's monotonic clock.
    deadline: float
    fresh_nonce: int  # nonce of the new incarnation, if this claim completes it


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a session, other than a claim."""

    session: SessionKey
    message: Announce | HoldsAnswer | Leave | Withdraw


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


Happening = Claimed | ReformClaim | Received | SessionEnded | Refused | Ticked


# Actions: the registry's outputs.


@dataclass(frozen=True, slots=True)
class Send:
    """A message to a session: the outcome of its claim, a question, or a notice."""

    session: SessionKey
    message: StoreMessage


@dataclass(frozen=True, slots=True)
class Forget:
    """Deletion of every key of an incarnation that has ended."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Remember:
    """Durable storage of a name's highest epoch."""

    world: str
    epoch: int


Action = Send | Forget | Remember
