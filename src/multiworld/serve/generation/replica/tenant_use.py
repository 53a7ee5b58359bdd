"""Places and blocks that each tenant's running sequences have. Pure.

What is scarce is shared as in "Dominant Resource Fairness" (Ghodsi et al., NSDI 2011):
a tenant's use is its largest share of any resource, divided by its weight, and the one
with the largest use is the first to give something up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from multiworld.serve.generation.replica.scheduled_sequence import ScheduledSequence
from multiworld.serve.tenants.fair_queue import Share


class TenantUse:
    """Use of one scheduler's places and blocks.

    Args:
        places: Maximum number of running sequences.
        blocks: Number of blocks.
    """

    def __init__(self, places: int, blocks: int) -> None:
        self._limits = places, blocks
        self._places: Counter[Share] = Counter()
        self._blocks: Counter[Share] = Counter()

    def copy(self) -> TenantUse:
        """Return a copy, to try what would follow from something."""
        copied = TenantUse(*self._limits)
        copied._places, copied._blocks = self._places.copy(), self._blocks.copy()
        return copied

    def add(self, share: Share, *, places: int = 0, blocks: int = 0) -> None:
        """Record that a tenant has more, or less, of something.

        Args:
            share: The tenant.
            places: Number of places.
            blocks: Number of blocks.
        """
        for uses, count in ((self._places, places), (self._blocks, blocks)):
            uses[share] += count
            if not uses[share]:
                del uses[share]

    def of(self, share: Share, *, places: int = 0, blocks: int = 0) -> float:
        """Return the use of a tenant, if it had some more.

        Args:
            share: The tenant.
            places: Number of places.
            blocks: Number of blocks.
        """
        most_places, most_blocks = self._limits
        used = (
            (self._places[share] + places) / most_places,
            (self._blocks[share] + blocks) / most_blocks,
        )
        return max(used) / share.weight

    def victim_for(
        self,
        newcomer: ScheduledSequence,
        blocks: int,
        idle: Iterable[ScheduledSequence],
    ) -> ScheduledSequence | None:
        """Return the sequence that another tenant's is preempted for.

        Its tenant keeps at least as much as the newcomer's will have, so that they do
        not preempt each other in turns.

        Args:
            newcomer: The sequence that lacks a place or blocks.
            blocks: Blocks that it needs.
            idle: Sequences that may be preempted now.
        """
        wanted = self.of(newcomer.share, places=1, blocks=blocks)
        found = [
            s
            for s in idle
            if s.share != newcomer.share
            and self.of(s.share, places=-1, blocks=-s.blocks) >= wanted
        ]
        return max(found, key=lambda s: (self.of(s.share), s.number), default=None)

    def last(
        self, grower: ScheduledSequence, idle: Iterable[ScheduledSequence]
    ) -> ScheduledSequence | None:
        """Return the sequence to preempt for a running one that needs a block.

        It is the last one of the tenant that uses most. But a tenant's only sequence is
        not preempted for one that came later, or a long one would never end.

        Args:
            grower: The sequence that needs a block.
            idle: Sequences that may be preempted now.
        """
        found = [
            s
            for s in idle
            if s.share == grower.share
            or self._places[s.share] > 1
            or s.number > grower.number
        ]

        first = grower.share.priority
        later = [
            s for s in found if s.number > grower.number and s.share.priority <= first
        ]
        if later and self._places[grower.share] == 1:
            found = later  # it is its tenant's only one itself

        def rank(sequence: ScheduledSequence) -> tuple[int, float, int]:
            share = sequence.share
            return -share.priority, self.of(share), sequence.number

        return max(found, key=rank, default=None)
