"""A sequence at its scheduler. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.protocol import Key


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence at its scheduler.

    Attributes:
        key: Gateway, stream and attempt.
        computed: Number of tokens whose KV blocks are computed, or being computed.
        rebuild: Number of tokens that the later stages have; 0 once no sequence lacks
            such tokens in this stage.
        is_in_flight: True while its next token is being computed.
        number: Order of arrival.
        is_probe: Whether it skips the queue.
        is_suspect: Whether it runs alone until it produces a token.
        is_paused: Whether it waits because a stage of its chain is being replaced.
        route: Replicas by stage that compute it.
        sample_rows: Cost of sampling one of its tokens, in rows.
    """

    key: Key
    tokens: list[int]
    share: Share = DEFAULT_SHARE
    computed: int = 0
    rebuild: int = 0
    is_in_flight: bool = False
    blocks: int = 0
    number: int = 0
    is_probe: bool = False
    is_suspect: bool = False
    is_paused: bool = False
    route: tuple[str, ...] = ()
    last_step: int = 0
    sample_rows: float = 0.0

    @property
    def lacking(self) -> int:
        """Number of tokens still to be computed."""
        return len(self.tokens) - self.computed

    def waits_for(self, full: Collection[str]) -> bool:
        """Return whether it waits until replicas have memory; a probe never does."""
        return not self.is_probe and any(name in full for name in self.route)


def by_route(ready: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Sort sequences into the order in which they enter a step.

    The one that has waited longest is first, followed by those of the same route: if a
    step is split between replicas, each of them reads all weights.
    """
    ready.sort(key=lambda s: s.last_step)
    if ready:
        first = ready[0].route
        ready.sort(key=lambda s: s.route != first)
    return ready
