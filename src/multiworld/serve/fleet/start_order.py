"""The order in which missing processes are started, and how many at once. Pure.

Starts compete for processor time: if all were started at once, all would be late. So
only two for each core are started at once, and the most needed first:
gateways; then a stage that nothing serves; then what was lost; then growth. Among
equals, the stage goes first that has the smallest part of its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multiworld.serve.resources.amounts import Node

StageKey = tuple[str, str, int]
"""Model, version and stage; model and version are empty for gateways."""

PER_CORE = 2
"""Starts at once for each core, because a start waits for others half of its time."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A stage that has fewer replicas than desired.

    Attributes:
        key: The stage; gateways count as one.
        count: Replicas that are desired.
        missing: Replicas that are to be started.
        lost: Replicas that were lost and are not started again yet.
    """

    key: StageKey
    count: int
    missing: int
    lost: int


def next_starts(shortages: Sequence[Shortage], free: int) -> list[StageKey]:
    """Return the stages of which to start a replica now, the most needed first.

    Args:
        shortages: The stages that lack replicas.
        free: Most replicas to start; gateways are started in any case.
    """
    found = sorted(
        (_urgency(shortage, nth), shortage.key)
        for shortage in shortages
        for nth in range(shortage.missing)
    )
    gateways = [key for _, key in found if not key[0]]
    workers = [key for _, key in found if key[0]]
    return gateways + workers[: max(0, free)]


def _urgency(shortage: Shortage, nth: int) -> tuple[int, float]:
    """Return the urgency of the nth start of a stage; lower is more urgent."""
    there = shortage.count - shortage.missing + nth
    if not there:
        rank = 0
    elif nth < shortage.lost:
        rank = 1
    else:
        rank = 2
    return rank, there / shortage.count


def starts_at_once(nodes: Iterable[Node]) -> int:
    """Return how many processes the machines can start at once.

    Args:
        nodes: The machines; those with one address are one machine.
    """
    cores: dict[str, float] = {}
    for node in nodes:
        cores[node.address] = max(cores.get(node.address, 0.0), node.cpus)
    return sum(max(1, int(PER_CORE * each)) for each in cores.values())
