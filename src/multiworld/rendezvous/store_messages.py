"""Messages between members and a store. Pure.

A session begins with a ``StoreHello``. Then the member sends requests, and the store
sends replies and notices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec

from multiworld.config import MAX_WAIT_S
from multiworld.net.handshake_messages import Hello, Message
from multiworld.rendezvous.membership import Member

MAX_SIZE = 65_536
"""Largest world size that a claim may ask for."""

MAX_EPOCH = 1 << 53
"""Upper bound of epochs: the integers below it survive any JSON reader."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SIZE)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=MAX_EPOCH)]
Place = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


class StoreHello(Hello, frozen=True):
    """Opens a session with a store.

    Attributes:
        world: The world to join, for the store's log; may be empty.
    """

    world: str = ""


class SealedMember(msgspec.Struct, frozen=True):
    """A member, with a proof that a holder of the secret made this record.

    Attributes:
        member: The member. The store assigns its rank, so the proof does not cover it.
        proof: The proof; empty without a secret.
    """

    member: Member
    proof: str = ""

    def at(self, rank: int) -> SealedMember:
        """Return the same record with another rank."""
        return SealedMember(replace(self.member, rank=rank), self.proof)


# Requests of a member.


class Claim(Message, frozen=True, kw_only=True):
    """A claim on a rank.

    Attributes:
        request: Number of the request within the session.
        world: The world's name.
        rank: The rank that it claims.
        size: The world size that it asks for.
        terms: Options that all members must agree on, in words.
        uid: Name of its manager, unique for ever.
        seen: The highest epoch of this name that it has seen.
        deadline_s: Seconds to wait for the other members.
        member: Its member record.
        place: Number of the store and count of stores; see ``registry``.
    """

    request: int
    world: str
    rank: Rank
    size: Size
    terms: str
    uid: str
    seen: Epoch
    deadline_s: Seconds
    member: SealedMember
    place: tuple[Place, Place]


class SurvivorClaim(Message, frozen=True, kw_only=True):
    """A survivor's claim on a rank in the next incarnation of a broken world.

    Attributes:
        request: As for ``Claim``.
        world: As for ``Claim``.
        epoch: Epoch of the incarnation that broke.
        rank: Its rank in that incarnation.
        size: World size of that incarnation.
        lost: Ranks to go on without.
        terms: As for ``Claim``.
        uid: As for ``Claim``.
        deadline_s: As for ``Claim``.
        member: As for ``Claim``.
        place: As for ``Claim``.
    """

    request: int
    world: str
    epoch: Epoch
    rank: Rank
    size: Size
    lost: tuple[Rank, ...]
    terms: str
    uid: str
    deadline_s: Seconds
    member: SealedMember
    place: tuple[Place, Place]


class Withdraw(Message, frozen=True):
    """A session withdraws the claim with this request number."""

    request: int


class Announce(Message, frozen=True):
    """A session reports a rank that it held before the store started."""

    world: str
    epoch: Epoch
    rank: Rank
    uid: str


class Leave(Message, frozen=True):
    """A session no longer holds a rank, and knows these other ranks to be lost."""

    world: str
    epoch: Epoch
    rank: Rank
    lost: tuple[Rank, ...] = ()


class HoldsAnswer(Message, frozen=True):
    """An answer to ``AskHolds``."""

    ask: int
    holds: bool


class SetValue(Message, frozen=True):
    """Set a key."""

    request: int
    key: str
    value: str


class GetValues(Message, frozen=True):
    """Return the values of keys, once all have one."""

    request: int
    keys: tuple[str, ...]
    deadline_s: Seconds


class CheckKeys(Message, frozen=True):
    """Return whether every key has a value."""

    request: int
    keys: tuple[str, ...]


class AddAmount(Message, frozen=True):
    """Add to a counter and return the sum."""

    request: int
    key: str
    amount: int


class CompareSet(Message, frozen=True):
    """Set a key if it has the expected value; return the value it then has."""

    request: int
    key: str
    expected: str
    desired: str


class DeleteKey(Message, frozen=True):
    """Delete a key and return whether it had a value."""

    request: int
    key: str


class CountKeys(Message, frozen=True):
    """Return the number of keys."""

    request: int


ValueRequest = (
    SetValue | GetValues | CheckKeys | AddAmount | CompareSet | DeleteKey | CountKeys
)

StoreRequest = (
    Claim | SurvivorClaim | Withdraw | Announce | Leave | HoldsAnswer | ValueRequest
)


# Outcomes of a request.


class Admitted(Message, frozen=True):
    """The members of a new incarnation are complete.

    Attributes:
        epoch: The incarnation's epoch.
        nonce: Random bits that identify the incarnation.
        members: The members, by rank.
    """

    epoch: int
    nonce: int
    members: tuple[SealedMember, ...]


class JoinTimedOut(Message, frozen=True):
    """The deadline of a claim passed; these ranks had claimed, and those had not."""

    present: tuple[int, ...]
    missing: tuple[int, ...]


class Stale(Message, frozen=True):
    """The others went on without this survivor; they are at this epoch."""

    current: int


class RankTaken(Message, frozen=True):
    """Another live process holds the rank."""


class TermsDiffer(Message, frozen=True):
    """The members asked for different worlds."""

    detail: str


class VersionDiffers(Message, frozen=True):
    """A process with another version of the protocol wants to join the world."""

    theirs: int
    detail: str


class Crowded(Message, frozen=True):
    """The session has this many claims that wait, and may have no more."""

    limit: int


class Result(Message, frozen=True):
    """Result of a request about keys."""

    value: bool | int | str | list[str] | None


class NoValue(Message, frozen=True):
    """The deadline of a ``GetValues`` passed."""


ClaimOutcome = (
    Admitted | JoinTimedOut | Stale | RankTaken | TermsDiffer | VersionDiffers | Crowded
)


# Replies and notices of the store.


class ClaimReceived(Message, frozen=True):
    """Acknowledges a claim at once, before its outcome is known."""

    request: int


class Reply(Message, frozen=True):
    """The outcome of a request."""

    request: int
    outcome: ClaimOutcome | Result | NoValue


class AskHolds(Message, frozen=True):
    """Asks whether the process still holds a rank."""

    ask: int
    world: str
    epoch: int
    rank: int


class NewcomerWaits(Message, frozen=True):
    """A newcomer waits for the next incarnation, or has stopped waiting."""

    world: str
    epoch: int
    rank: int
    size: int
    is_gone: bool


class MemberGaveUp(Message, frozen=True):
    """A member withdrew its claim while it was being admitted."""

    world: str
    epoch: int
    rank: int


StoreMessage = ClaimReceived | Reply | AskHolds | NewcomerWaits | MemberGaveUp

requests: msgspec.json.Decoder[StoreRequest] = msgspec.json.Decoder(StoreRequest)
"""Decoder of what a member sends to a store."""

replies: msgspec.json.Decoder[StoreMessage] = msgspec.json.Decoder(StoreMessage)
"""Decoder of what a store sends to a member."""
