"""The choice of the members that go on after a loss, settled once. Pure.

Each survivor of an incarnation claims its place at the store, and names the ranks that
it believes lost. The choice is settled once every rank has either claimed or been
accused by a survivor that has.

The first claim wins. A survivor that an earlier claim accuses is refused: it is alive,
but the others go on without it. An accusation against a survivor that claimed earlier
is ignored. So if two halves of a world accuse each other, exactly one half goes on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from multiworld.rendezvous.store_messages import SealedMember


@dataclass(frozen=True, slots=True, kw_only=True)
class ReformClaim:
    """A survivor of a broken incarnation claims a rank in the next one.

    Attributes:
        session: The session that claims.
        request: Number of the request within the session.
        world: The world's name.
        epoch: Epoch of the incarnation that broke.
        rank: Its rank in that incarnation.
        size: World size of that incarnation.
        lost: Ranks that it believes lost, or that have left.
        terms: Options that all survivors must agree on, in words.
        uid: Name of its manager, unique for ever.
        deadline: End of its wait, in seconds on the store's monotonic clock.
        member: Its member record; the registry replaces the rank in it.
        fresh_nonce: Nonce of the next incarnation if this is its highest old rank.
        place: Number of its store and count of stores; see ``registry``.
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
    member: SealedMember
    fresh_nonce: int
    place: tuple[int, int] = (0, 1)


@dataclass(slots=True)
class Reform:
    """Claims of one incarnation's survivors."""

    epoch: int
    size: int
    claims: dict[int, ReformClaim] = field(default_factory=dict)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that a claim accuses and that have not claimed."""
        accused = frozenset[int]().union(*(c.lost for c in self.claims.values()))
        return accused - self.claims.keys()

    def accuses(self, claim: ReformClaim) -> bool:
        """Tell whether an earlier claim accuses this claimant."""
        return claim.rank in self.lost

    def accept(self, claim: ReformClaim) -> None:
        """Add a survivor's claim, with its accusations."""
        self.claims[claim.rank] = claim

    def missing(self) -> list[int]:
        """Return the ranks that have neither claimed nor been accused."""
        return sorted(set(range(self.size)) - self.claims.keys() - self.lost)

    @property
    def is_settled(self) -> bool:
        """True once no rank is missing."""
        return bool(self.claims) and not self.missing()

    def remove(self, rank: int) -> None:
        """Remove the claim of one rank, with its accusations."""
        del self.claims[rank]

    def drop(self, session: int, request: int | None = None) -> None:
        """Remove the claims of a session, with their accusations.

        Args:
            session: The session.
            request: The request to remove; None removes all of the session's.
        """
        for rank, claim in list(self.claims.items()):
            if claim.session == session and request in (None, claim.request):
                del self.claims[rank]

    def members(self) -> list[ReformClaim]:
        """Return the claims of the survivors, in the order of their new ranks."""
        return [self.claims[rank] for rank in sorted(self.claims)]
