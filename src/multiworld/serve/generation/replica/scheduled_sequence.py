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
        tokens: All tokens so far: the prompt and what was generated.
        computed: Number of tokens of which the keys and values are computed, or are
            being computed.
        refill: Number of tokens that the other stages have; 0 once no sequence lacks
            such tokens here.
        is_under_way: True while its next token is being computed.
        blocks: Blocks that it has.
        number: Order of arrival.
        share: Its tenant.
        is_probe: Whether it waits for nobody.
        is_suspect: Whether it is computed alone until it has a token.
        is_paused: Whether it is not computed now, as a stage of its chain is replaced.
        route: Replicas by stage that compute it.
        last_step: Number of the last step with a part of it.
        sample_rows: What the choice of one of its tokens costs, in rows.
    """

    key: Key
    tokens: list[int]
    share: Share = DEFAULT_SHARE
    computed: int = 0
    refill: int = 0
    is_under_way: bool = False
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
        """Number of tokens that are still to be computed."""
        return len(self.tokens) - self.computed

    def uses(self, replicas: Collection[str]) -> bool:
        """Tell whether one of some replicas computes it."""
        return any(name in replicas for name in self.route)


def by_route(ready: list[ScheduledSequence]) -> list[ScheduledSequence]:
    """Return sequences in the order in which they go into a step.

    Who has waited longest is first, and with it those of the same route: a step that is
    split between replicas costs each of them the reading of all weights.

    Args:
        ready: The sequences; they are sorted.
    """
    ready.sort(key=lambda s: s.last_step)
    if ready:
        first = ready[0].route
        ready.sort(key=lambda s: s.route != first)
    return ready
