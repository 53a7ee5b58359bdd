"""Order in which missing processes start, and how many start at once. Pure.

Starts compete for processor time, so the most needed go first: gateways, stages without
a replica, lost replicas, growth. Among equals, the stage with the smallest fraction of
its desired replicas goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multiworld.serve.machines.amounts import Node

StageKey = tuple[str, str, int]  # model, version and stage; ("", "", …) for gateways
# Seconds after which a start counts as slow, so that urgent starts do not wait for it.
SLOW_START_S = 10.0
PER_CORE = 2  # concurrent starts per core: two, because a start waits half of its time


@dataclass(frozen=True, slots=True)
class Shortage:
    """A stage that lacks ``missing`` replicas, ``lost`` of them because of losses."""

    key: StageKey
    count: int
    missing: int
    lost: int

    @property
    def urgent(self) -> int:
        """Number of starts that must not wait for slow ones: lost or first replicas."""
        first = int(self.missing == self.count > 0)
        return min(self.missing, max(self.lost, first))


def next_starts(shortages: Sequence[Shortage], free: int) -> list[StageKey]:
    """Return the most needed starts: all gateways, and at most ``free`` replicas."""
    found = sorted(
        (_urgency(shortage, nth), shortage.key)
        for shortage in shortages
        for nth in range(shortage.missing)
    )
    gateways = [key for _, key in found if not key[0]]
    workers = [key for _, key in found if key[0]]
    return gateways + workers[: max(0, free)]


def urgent_starts(
    shortages: Sequence[Shortage], chosen: Sequence[StageKey], limit: int
) -> list[StageKey]:
    """Return urgent starts beyond ``chosen``, the most needed first."""
    taken = Counter(chosen)
    found = sorted(
        (_urgency(shortage, nth), shortage.key)
        for shortage in shortages
        if shortage.key[0]
        for nth in range(taken[shortage.key], shortage.urgent)
    )
    return [key for _, key in found[:limit]]


def _urgency(shortage: Shortage, nth: int) -> tuple[int, float]:
    """Return the urgency of a stage's nth start; lower is more urgent."""
    there = shortage.count - shortage.missing + nth
    if not there:
        rank = 0
    elif nth < shortage.lost:
        rank = 1
    else:
        rank = 2
    return rank, there / shortage.count


def starts_at_once(nodes: Iterable[Node]) -> int:
    """Return how many processes may start at once; an address counts as one machine."""
    cores: dict[str, float] = {}
    for node in nodes:
        cores[node.address] = max(cores.get(node.address, 0.0), node.cpus)
    return sum(max(1, int(PER_CORE * each)) for each in cores.values())
