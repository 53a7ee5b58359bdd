"""Sequence slots and KV blocks used by each tenant's running sequences. Pure.

A tenant's use is its largest share of any resource, divided by its weight; the tenant
with the largest use is preempted first ("Dominant Resource Fairness", Ghodsi et al.,
NSDI 2011).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence


class TenantUse:
    def __init__(self, slots: int, blocks: int) -> None:
        self._limits = slots, blocks
        self._slots: Counter[Share] = Counter()
        self._blocks: Counter[Share] = Counter()

    def copy(self) -> TenantUse:
        """Return a copy, to evaluate hypothetical changes."""
        copied = TenantUse(*self._limits)
        copied._slots, copied._blocks = self._slots.copy(), self._blocks.copy()
        return copied

    def add(self, share: Share, *, slots: int = 0, blocks: int = 0) -> None:
        for uses, count in ((self._slots, slots), (self._blocks, blocks)):
            uses[share] += count
            if not uses[share]:
                del uses[share]

    def of(self, share: Share, *, slots: int = 0, blocks: int = 0) -> float:
        """Return the use of a tenant if it had this many more slots and blocks."""
        max_slots, max_blocks = self._limits
        used = (
            (self._slots[share] + slots) / max_slots,
            (self._blocks[share] + blocks) / max_blocks,
        )
        return max(used) / share.weight

    def victim_for(
        self,
        newcomer: ScheduledSequence,
        blocks: int,
        idle: Iterable[ScheduledSequence],
    ) -> ScheduledSequence | None:
        """Return the sequence to preempt for a newcomer of another tenant."""
        wanted = self.of(newcomer.share, slots=1, blocks=blocks)
        # The victim's tenant must keep at least as much as the newcomer's will have:
        # otherwise the two would preempt each other in turn.
        found = [
            s
            for s in idle
            if s.share != newcomer.share
            and self.of(s.share, slots=-1, blocks=-s.blocks) >= wanted
        ]
        return max(found, key=lambda s: (self.of(s.share), s.number), default=None)

    def last(
        self, grower: ScheduledSequence, idle: Iterable[ScheduledSequence]
    ) -> ScheduledSequence | None:
        """Return the sequence to preempt for a running one that needs a block."""
        # It is the latest sequence of the tenant that uses most, in the lowest
        # priority. The only sequence of a tenant is not preempted for a later one:
        # otherwise, a long sequence would never finish.
        found = [
            s
            for s in idle
            if s.share == grower.share
            or self._slots[s.share] > 1
            or s.number > grower.number
        ]

        first = grower.share.priority
        later = [
            s for s in found if s.number > grower.number and s.share.priority <= first
        ]
        if later and self._slots[grower.share] == 1:
            # Its tenant has no other sequence, so only later ones can be preempted.
            found = later

        def rank(sequence: ScheduledSequence) -> tuple[int, float, int]:
            share = sequence.share
            return -share.priority, self.of(share), sequence.number

        return max(found, key=rank, default=None)
