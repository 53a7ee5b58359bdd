"""Messages between members and a store: a ``StoreHello``, then requests of the member,
and replies and notices of the store. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec

from multiworld.config import MAX_WAIT_S
from multiworld.net.handshake_messages import Hello, Message
from multiworld.rendezvous.membership import Member

MAX_NAME = 1024  # maximum number of characters in a world's name
MAX_SIZE = 65_536  # maximum world size of a claim
MAX_EPOCH = 1 << 53  # JSON readers represent all integers up to this one exactly

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SIZE)]
Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
Epoch = Annotated[int, msgspec.Meta(ge=0, lt=MAX_EPOCH)]
Place = Annotated[int, msgspec.Meta(ge=0, le=1024)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)]


class StoreHello(Hello, frozen=True):
    """Opens a session with a store; ``world`` is for the store's log."""

    world: Name = ""


class SealedMember(msgspec.Struct, frozen=True):
    """A member; ``proof`` shows that a holder of the secret set all fields but rank."""

    member: Member
    proof: str = ""

    def at(self, rank: int) -> SealedMember:
        return SealedMember(replace(self.member, rank=rank), self.proof)


# Requests of a member.


class Newcomer(Message, frozen=True, kw_only=True):
    """The rank that a joining member wants."""

    world: Name
    rank: Rank
    size: Size
    terms: str  # options that all members must agree on, as text
    seen: Epoch  # highest epoch of this name that the member has seen


class Claim(Newcomer, frozen=True, kw_only=True, tag="Claim"):
    """A claim on a rank."""

    request: int
    uid: str  # globally unique name of the claiming manager
    deadline_s: Seconds
    member: SealedMember
    place: tuple[Place, Place]  # number of its store, number of stores


class Survivor(Message, frozen=True, kw_only=True):
    """The rank that a survivor had in the incarnation that broke."""

    world: Name
    epoch: Epoch  # of that incarnation, like rank and size
    rank: Rank
    size: Size
    lost: frozenset[Rank]
    terms: str


class SurvivorClaim(Survivor, frozen=True, kw_only=True, tag="SurvivorClaim"):
    """A claim on a rank in the next incarnation; see ``reform``."""

    request: int
    uid: str
    deadline_s: Seconds
    member: SealedMember
    place: tuple[Place, Place]


class Withdraw(Message, frozen=True, tag="Withdraw"):
    request: int


class Announce(Message, frozen=True, tag="Announce"):
    """Reports a rank that the session held before the store started."""

    world: Name
    epoch: Epoch
    rank: Rank
    uid: str


class Leave(Message, frozen=True, tag="Leave"):
    """Gives up a rank, and reports other ranks that are lost."""

    world: Name
    epoch: Epoch
    rank: Rank
    lost: tuple[Rank, ...] = ()


class HoldsAnswer(Message, frozen=True, tag="HoldsAnswer"):
    ask: int
    holds: bool


class SetValue(Message, frozen=True, tag="SetValue"):
    request: int
    key: str
    value: str


class GetValues(Message, frozen=True, tag="GetValues"):
    """Asks for the values of keys; answered once every key has one."""

    request: int
    keys: tuple[str, ...]
    deadline_s: Seconds


class CheckKeys(Message, frozen=True, tag="CheckKeys"):
    request: int
    keys: tuple[str, ...]


class AddAmount(Message, frozen=True, tag="AddAmount"):
    """Adds to a counter; the result is the sum."""

    request: int
    key: str
    amount: int


class CompareSet(Message, frozen=True, tag="CompareSet"):
    """Sets a key if it has the expected value; the result is its value afterwards."""

    request: int
    key: str
    expected: str
    desired: str


ValueRequest = SetValue | GetValues | CheckKeys | AddAmount | CompareSet

StoreRequest = (
    Claim | SurvivorClaim | Withdraw | Announce | Leave | HoldsAnswer | ValueRequest
)


# Outcomes of a request.


class Admitted(Message, frozen=True, tag="Admitted"):
    """The members of a new incarnation are complete; they are listed by rank."""

    epoch: int
    nonce: int
    members: tuple[SealedMember, ...]


class JoinTimedOut(Message, frozen=True, tag="JoinTimedOut"):
    present: tuple[int, ...]
    missing: tuple[int, ...]


class Stale(Message, frozen=True, tag="Stale"):
    """The others continued without this survivor; they are at this epoch."""

    current: int


class RankTaken(Message, frozen=True, tag="RankTaken"):
    """Another live process holds the rank."""


class TermsDiffer(Message, frozen=True, tag="TermsDiffer"):
    detail: str


class VersionDiffers(Message, frozen=True, tag="VersionDiffers"):
    """A process with another version of the protocol wants to join the world."""

    theirs: int
    detail: str


class Crowded(Message, frozen=True, tag="Crowded"):
    """The session has this many waiting claims, the maximum."""

    limit: int


class Result(Message, frozen=True, tag="Result"):
    value: bool | int | str | list[str] | None


class NoValue(Message, frozen=True, tag="NoValue"):
    """The deadline of a ``GetValues`` passed."""


class Full(Message, frozen=True, tag="Full"):
    """The store holds the maximum amount of keys and values."""

    limit: int  # characters


ClaimOutcome = (
    Admitted | JoinTimedOut | Stale | RankTaken | TermsDiffer | VersionDiffers | Crowded
)
Outcome = ClaimOutcome | Result | NoValue | Full


# Replies and notices of the store.


class ClaimReceived(Message, frozen=True, tag="ClaimReceived"):
    """Acknowledges a claim at once, before its outcome is known."""

    request: int


class Reply(Message, frozen=True, tag="Reply"):
    request: int
    outcome: Outcome


class AskHolds(Message, frozen=True, tag="AskHolds"):
    ask: int
    world: str
    epoch: int
    rank: int


class NewcomerWaits(Message, frozen=True, tag="NewcomerWaits"):
    """A newcomer waits for the next incarnation, or has stopped waiting."""

    world: str
    epoch: int
    rank: int
    size: int
    is_gone: bool


class MemberGaveUp(Message, frozen=True, tag="MemberGaveUp"):
    """A member withdrew its claim during its admission."""

    world: str
    epoch: int
    rank: int


StoreMessage = ClaimReceived | Reply | AskHolds | NewcomerWaits | MemberGaveUp

requests: msgspec.json.Decoder[StoreRequest] = msgspec.json.Decoder(StoreRequest)

replies: msgspec.json.Decoder[StoreMessage] = msgspec.json.Decoder(StoreMessage)
