"""Who goes on after a loss: settled once, by the first who comes. Pure.

Each survivor of an incarnation brings the ranks that it believes lost. It is settled
when every rank has either come or been accused by one who has. Whoever was accused by
one who came before it is refused: it lives, but the others go on without it. An
accusation against one who came before it counts for nothing: that one lives, and
reached the store first. So of two halves that accuse each other, one goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformClaim:
    """A survivor of incarnation ``epoch`` wants to go on.

    Attributes:
        rank: Its rank in that incarnation.
        size: That incarnation's world size.
        lost: Ranks that it knows to be lost, or to have left.
        terms: What all must agree on.
        member: Its record; the rank in it is replaced by the new one.
    """

    session: int
    request: int
    world: str
    epoch: int
    rank: int
    size: int
    lost: frozenset[int]
    terms: str
    uid: str
    deadline: float
    member: Record
    fresh_nonce: int
    place: tuple[int, int] = (0, 1)


@dataclass(slots=True)
class Reform:
    """The gathering of one incarnation's survivors."""

    epoch: int
    size: int
    claims: dict[int, ReformClaim] = field(default_factory=dict)

    @property
    def lost(self) -> frozenset[int]:
        """Whom those who are here accuse, and who is not here."""
        accused = frozenset[int]().union(*(c.lost for c in self.claims.values()))
        return accused - self.claims.keys()

    def accuses(self, claim: ReformClaim) -> bool:
        """Tell whether one who came before has declared this claimant lost."""
        return claim.rank in self.lost

    def accept(self, claim: ReformClaim) -> None:
        """Let a survivor in, with its accusations."""
        self.claims[claim.rank] = claim

    def missing(self) -> list[int]:
        """Return the ranks that have neither come nor been accused."""
        return sorted(set(range(self.size)) - self.claims.keys() - self.lost)

    @property
    def is_settled(self) -> bool:
        """True once nobody has to be waited for."""
        return bool(self.claims) and not self.missing()

    def drop(self, session: int, request: int | None = None) -> None:
        """Forget the claims of a session, or one of them, and what they said."""
        for rank, claim in list(self.claims.items()):
            if claim.session == session and request in (None, claim.request):
                del self.claims[rank]

    def members(self) -> list[ReformClaim]:
        """Return who goes on, in the order of the new ranks."""
        return [self.claims[rank] for rank in sorted(self.claims)]
