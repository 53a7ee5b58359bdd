"""Scheduling state of sequences. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.replica.scheduling.sample_costs import FREE, SampleCosts
from multiworld.serve.wire.protocol import Key


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    key: Key
    tokens: list[int]
    share: Share = DEFAULT_SHARE
    # Number of tokens whose KV is computed, including those in flight.
    computed: int = 0
    # Number of tokens whose KV later stages already had when the sequence arrived here.
    # 0 once this stage has rebuilt the KV of all such sequences.
    rebuild: int = 0
    is_in_flight: bool = False  # its next token is being computed
    blocks: int = 0
    number: int = 0  # number of the sequence, in the order of arrival
    is_probe: bool = False  # True if it skips the queue
    # A suspect runs alone, or with its group, until it has produced some tokens.
    is_suspect: bool = False
    # Gateway and number of a suspect's group; None: a suspect runs alone.
    group: tuple[str, int] | None = None
    proof: int = 0  # number of tokens that it has produced as a suspect
    is_paused: bool = False  # True while a replica of its chain is being replaced
    route: tuple[str, ...] = ()  # the replica of each stage in its chain
    last_step: int = 0
    costs: SampleCosts = FREE

    @property
    def lacking(self) -> int:
        return len(self.tokens) - self.computed

    def waits_for(self, full: Collection[str]) -> bool:
        """Return whether it waits for one of the ``full`` replicas; probes never do."""
        return not self.is_probe and any(name in full for name in self.route)


def by_route(ready: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Sort sequences into the order in which they enter a step."""
    # The sequence that has waited longest is first, followed by all others of its
    # route. A step with several routes is split between replicas, each of which reads
    # all its weights for its part.
    ready.sort(key=lambda s: s.last_step)
    if ready:
        first = ready[0].route
        ready.sort(key=lambda s: s.route != first)
    return ready
