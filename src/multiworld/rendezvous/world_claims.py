"""Claims on one name, and the holders of its ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from multiworld.rendezvous import store_messages as messages
from multiworld.rendezvous.claims import Action, Claimed, RequestKey, Send, SessionKey
from multiworld.rendezvous.reform import Reform, ReformClaim

# Name of the world, whether the claim is a survivor's, and rank.
WaitKey = tuple[str, bool, int]


@dataclass(slots=True)
class Holder:
    """A member of an admitted incarnation."""

    uid: str
    session: SessionKey
    request: RequestKey = 0


@dataclass(slots=True)
class Current:
    """The last admitted incarnation, while a session holds a rank of it."""

    epoch: int
    holders: dict[int, Holder]
    # Epoch of the broken incarnation that this one continues; None: it continues none.
    reforms: int | None = None
    members: int = 0  # number of members that have not withdrawn


@dataclass(slots=True)
class WorldClaims:
    current: Current | None = None
    forming: dict[int, Claimed] = field(default_factory=dict)  # waiting, by rank
    reforming: Reform | None = None
    # Number of the open question about the holder, by rank.
    asking: dict[int, int] = field(default_factory=dict)
    # Sessions that hold a rank in this world.
    sessions: set[SessionKey] = field(default_factory=set)

    @property
    def waits(self) -> bool:
        """True while a claim waits for other members."""
        return bool(self.forming) or self.reforming is not None


@dataclass(slots=True)
class Question:
    """Claims that wait for an answer from the holder of their rank."""

    claims: list[Claimed]
    world: str
    epoch: int
    rank: int
    deadline: float
    holder: SessionKey


def expired_survivors(world: WorldClaims, now: float) -> list[Action]:
    """Remove survivors that waited too long; return their answers."""
    reform = world.reforming
    if reform is None:
        return []
    late = [claim for claim in reform.claims.values() if claim.deadline <= now]
    present, missing = sorted(reform.claims), reform.missing()
    for claim in late:
        del reform.claims[claim.rank]
    if not reform.claims:
        world.reforming = None
    return [timed_out(claim, present, missing) for claim in late]


def wait_key(claim: Claimed | ReformClaim) -> WaitKey:
    return claim.world, isinstance(claim, ReformClaim), claim.rank


def reply(claim: Claimed | ReformClaim, outcome: messages.ClaimOutcome) -> Send:
    return Send(claim.session, messages.Reply(claim.request, outcome))


def timed_out(
    claim: Claimed | ReformClaim, present: list[int], missing: list[int]
) -> Send:
    return reply(claim, messages.JoinTimedOut(tuple(present), tuple(missing)))


def stale(claim: ReformClaim, current: int) -> Send:
    return reply(claim, messages.Stale(current))


def taken(claim: Claimed) -> Send:
    return reply(claim, messages.RankTaken())


NAMED = 8  # maximum number of ranks named in the text of a mismatch


def mismatch(forming: Mapping[int, Claimed]) -> messages.TermsDiffer:
    """Return the outcome of claims that do not agree."""
    first = sorted(forming.items())[:NAMED]
    asked = [
        f"rank {rank} asked for size {claim.size}, {claim.terms}"
        for rank, claim in first
    ]
    more = len(forming) - len(first)
    return messages.TermsDiffer("; ".join([*asked, *[f"and {more} more"] * bool(more)]))
