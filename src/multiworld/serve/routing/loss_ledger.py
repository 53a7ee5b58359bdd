"""Losses of replicas with one piece of work, and what follows from them. Pure.

Work that kills what computes it must be found; work whose host dies must not be
suspected. After some losses the work is a *suspect* and runs in isolation. If replicas
die while it runs alone, it is *poison*, and is refused. A loss before anything was
computed has another cause, and a loss soon after another is more likely the same fault
than a second one; such losses are not counted. Nor is the first loss of a crowd: most
replicas die of other causes, and one after the other a crowd would be late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Losses in isolation, without progress in between, that make work poison, and how many
# if other work may have caused some of them. Losing a host never does: a loss while it
# ran beside other work only makes it a suspect.
POISON_LOSSES, SHARED_LOSSES = 2, 3

# Tokens of a stream since its last loss with which it is no suspect any more. One or
# two do not show that: after a KV rebuild the next token is part of a prefill, and an
# engine may compute prompts and fail in decoding.
PROOF_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LossRule:
    """Which losses count; requests and streams differ."""

    suspect_after: int  # losses that count until the work runs in isolation
    unbegun: int  # losses in a row, before anything was computed, that do not count
    apart_s: float  # seconds between two losses that both count
    # If so many pieces of work were computed together, the first loss does not count.
    crowd: float = math.inf
    proof: int = 1  # pieces of progress after which the losses before are forgotten


# For requests with one answer. One replica holds a request at a time, and says when it
# begins to compute it; running one alone costs the others one batch, so eight cost
# about eight times what one loss costs anyway.
REQUEST_RULE = LossRule(suspect_after=1, unbegun=1, apart_s=0.0, crowd=8)

# For streams. A chain of replicas holds one, so a host may take several at once; while
# a suspect runs alone, all other streams of its stage-0 replica wait for its steps.
STREAM_RULE = LossRule(suspect_after=2, unbegun=3, apart_s=2.0, proof=PROOF_TOKENS)


@dataclass(slots=True)
class LossLedger:
    """Losses of one piece of work since it last made enough progress."""

    rule: LossRule
    counted: int = 0  # losses that count
    isolated: int = 0  # those of them in isolation
    shared: int = 0  # those of them in isolation, but other work ran there, too
    last_at: float = -math.inf  # monotonic time of the last that counts
    unbegun: int = 0  # not counted: nothing had been computed
    was_crowded: bool = False  # a loss was not counted: one of a crowd
    progress: int = 0  # since the last loss
    # Whether anything was computed since the last loss, or may have been.
    has_begun: bool = False
    # Monotonic time of the next attempt. A suspect waits until the next loss would
    # count, or it could take one replica after another meanwhile.
    not_before: float = -math.inf

    def add(
        self, now: float, *, is_alone: bool, is_shared: bool = False, together: int = 1
    ) -> bool:
        """Record the loss of a replica; return whether it counts."""
        # ``is_alone``: the replica computed nothing else.
        # ``is_shared``: it ran in isolation, but not everywhere. ``together``: number
        # of pieces of work that it computed.
        has_begun, self.has_begun = self.has_begun, False
        self.progress = 0
        if not has_begun and self.unbegun < self.rule.unbegun:
            self.unbegun += 1
            return False
        if together >= self.rule.crowd and not self.was_crowded:
            self.was_crowded = True
            return False
        if now - self.last_at < self.rule.apart_s:
            self.not_before = self.last_at + self.rule.apart_s
            return False
        self.counted += 1
        self.isolated += is_alone
        self.shared += is_shared
        self.last_at = now
        if self.is_suspect:
            self.not_before = now + self.rule.apart_s
        return True

    def was_alone(self, *, is_shared: bool) -> None:
        """Record, after the last loss, that it was one in isolation."""
        self.isolated += not is_shared
        self.shared += is_shared

    def advance(self) -> None:
        """Record progress; with enough of it, forget all losses."""
        self.has_begun, self.unbegun, self.not_before = True, 0, -math.inf
        self.progress += 1
        if self.progress >= self.rule.proof:
            self.counted = self.isolated = self.shared = 0
            self.was_crowded = False

    @property
    def is_suspect(self) -> bool:
        return self.counted >= self.rule.suspect_after

    @property
    def is_poison(self) -> bool:
        is_certain = self.isolated >= POISON_LOSSES
        return is_certain or self.isolated + self.shared >= SHARED_LOSSES
