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
    computed: int = 0  # tokens whose KV is computed, or being computed
    # Number of tokens that later stages already had when the sequence arrived; 0 once
    # this stage has rebuilt the KV of all such sequences.
    rebuild: int = 0
    is_in_flight: bool = False  # its next token is being computed
    blocks: int = 0
    number: int = 0  # order of arrival
    is_probe: bool = False  # it skips the queue
    # A suspect runs alone, or with its group, until it has produced some tokens.
    is_suspect: bool = False
    group: tuple[str, int] | None = None  # gateway and number; None: it runs alone
    proof: int = 0  # tokens that it has produced as a suspect
    is_paused: bool = False  # a stage of its chain is being replaced
    route: tuple[str, ...] = ()  # its replica of each stage
    last_step: int = 0
    costs: SampleCosts = FREE

    @property
    def lacking(self) -> int:
        return len(self.tokens) - self.computed

    def waits_for(self, full: Collection[str]) -> bool:
        """Return whether it waits for one of the ``full`` replicas; a probe never."""
        return not self.is_probe and any(name in full for name in self.route)


def by_route(ready: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Sort sequences into the order in which they enter a step."""
    # The longest waiting sequence is first, then all others of its route: if a step is
    # split between replicas, each of them reads all weights.
    ready.sort(key=lambda s: s.last_step)
    if ready:
        first = ready[0].route
        ready.sort(key=lambda s: s.route != first)
    return ready
