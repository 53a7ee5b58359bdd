"""Ledger of the replicas lost while they computed one piece of work. Pure.

The ledger finds work that kills its replicas, without blaming work whose host died.
After some losses, the work is a *suspect* and runs in isolation. If replicas die while
it runs alone, it is *poison*, and is refused.

Three kinds of losses do not count. A loss before anything was computed has another
cause. A loss soon after another one is more likely the same fault than a second one.
The first loss of a crowd (many pieces of work at one replica) most likely has another
cause, and running the crowd one by one would make it late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Number of losses in isolation, without progress in between, that makes work poison.
# The second number applies if other work may have caused some of the losses. Losing a
# host never makes work poison: losses while other work runs too only make a suspect.
POISON_LOSSES, SHARED_LOSSES = 2, 3

# A stream that produces this many tokens after a loss is no longer suspected. One or
# two tokens prove nothing: the first token after a KV rebuild comes from a prefill, and
# an engine may compute prompts correctly but fail in decoding.
PROOF_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LossRule:
    """Rule for which losses count; requests and streams have different rules."""

    suspect_after: int  # counted losses after which the work runs in isolation
    unbegun: int  # this many losses in a row before any computation do not count
    apart_s: float  # minimum seconds between two losses that both count
    # The first loss does not count if it hit at least this many pieces of work at once.
    crowd: float = math.inf
    proof: int = 1  # pieces of progress after which earlier losses are forgotten


# For requests with one answer. Only one replica at a time holds a request, and reports
# when it starts to compute the request. Running one request alone delays the others by
# one batch, so running eight alone costs about eight times what a loss costs anyway.
REQUEST_RULE = LossRule(suspect_after=1, unbegun=1, apart_s=0.0, crowd=8)

# For streams. A whole chain of replicas holds a stream, so losing one host may lose
# several of these replicas at once. While a suspect runs alone, all other streams of
# its stage-0 replica wait for the suspect's steps.
STREAM_RULE = LossRule(suspect_after=2, unbegun=3, apart_s=2.0, proof=PROOF_TOKENS)


@dataclass(slots=True)
class LossLedger:
    """Losses of one piece of work since it last made enough progress."""

    rule: LossRule
    counted: int = 0  # number of losses that count
    isolated: int = 0  # counted losses in isolation
    shared: int = 0  # counted losses in isolation that other work may have caused
    last_at: float = -math.inf  # monotonic time of the last counted loss
    unbegun: int = 0  # consecutive uncounted losses before any computation
    was_crowded: bool = False  # the first loss of a crowd was not counted
    progress: int = 0  # pieces of progress since the last loss
    # Whether some computation may have started since the last loss.
    has_begun: bool = False
    # Monotonic time before which no attempt starts. A suspect waits until its next loss
    # would count; without the wait, it could kill replicas in losses that do not count.
    not_before: float = -math.inf

    def add(
        self, now: float, *, is_alone: bool, is_shared: bool = False, together: int = 1
    ) -> bool:
        """Record the loss of a replica; return whether it counts."""
        # ``is_alone``: the lost replica computed nothing else. ``is_shared``: the work
        # ran in isolation, but other work may have caused the loss. ``together``:
        # number of pieces of work that the lost replica was computing.
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
        """Record, in hindsight, that the work ran in isolation at its last loss."""
        self.isolated += not is_shared
        self.shared += is_shared

    def advance(self) -> None:
        """Record one piece of progress; after enough progress, forget all losses."""
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
