"""The choice of the members that continue after a loss, settled once. Pure.

Each survivor claims its place at the store, and names the ranks that it believes lost.
The first claim wins: a survivor that it accuses is refused, and accusations against a
survivor that claimed earlier are ignored. So if two halves accuse each other, exactly
one of them continues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from multiworld.rendezvous.store_messages import SurvivorClaim


class ReformClaim(SurvivorClaim, frozen=True, kw_only=True):
    """A survivor's claim, which waits for the other survivors; see ``Claimed``."""

    session: int
    deadline: float
    # Nonce of the new incarnation, if this claim has the highest rank of the survivors.
    fresh_nonce: int


@dataclass(slots=True)
class Reform:
    """Claims of one incarnation's survivors, by rank."""

    epoch: int
    size: int
    claims: dict[int, ReformClaim] = field(default_factory=dict)

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that a claim accuses and that have not claimed."""
        accused = frozenset[int]().union(*(c.lost for c in self.claims.values()))
        return accused - self.claims.keys()

    def missing(self) -> list[int]:
        """Return the ranks that have neither claimed nor been accused."""
        return sorted(set(range(self.size)) - self.claims.keys() - self.lost)

    @property
    def is_settled(self) -> bool:
        return bool(self.claims) and not self.missing()

    def members(self) -> list[ReformClaim]:
        """Return the survivors' claims, in the order of their new ranks."""
        return [self.claims[rank] for rank in sorted(self.claims)]
