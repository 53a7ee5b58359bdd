"""Ledger of the replicas that were lost with one piece of work, to find poison. Pure.

Work that kills its replicas must be found; work whose host dies must not be suspected.
After some losses, the work is a *suspect* and runs in isolation. If replicas die while
it runs alone, it is *poison*, and is refused. Some losses do not count: a loss before
anything was computed has another cause, and a loss soon after another one is more
likely the same fault than a second one. Neither does the first loss of a crowd count:
most losses have other causes, and running a crowd one by one would make it late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Losses in isolation, without progress in between, that make work poison. The second
# number applies if other work may have caused some of them. Losing a host never makes
# work poison, because a loss beside other work only makes it a suspect.
POISON_LOSSES, SHARED_LOSSES = 2, 3

# Tokens since its last loss that clear a stream of suspicion. One or two tokens prove
# nothing: after a KV rebuild, the next token is part of a prefill, and an engine may
# compute prompts but fail in decoding.
PROOF_TOKENS = 8


@dataclass(frozen=True, slots=True)
class LossRule:
    """Rule for which losses count; requests and streams have different rules."""

    suspect_after: int  # counted losses after which the work runs in isolation
    unbegun: int  # losses in a row, before anything was computed, that do not count
    apart_s: float  # minimum seconds between two losses that both count
    # If this many pieces of work were computed together, the first loss does not count.
    crowd: float = math.inf
    proof: int = 1  # pieces of progress after which earlier losses are forgotten


# For requests with one answer. One replica holds a request at a time, and reports when
# it begins to compute it. Running one request alone costs the others one batch, so
# running eight alone costs about eight times as much as a loss costs anyway.
REQUEST_RULE = LossRule(suspect_after=1, unbegun=1, apart_s=0.0, crowd=8)

# For streams. A chain of replicas holds a stream, so losing one host may lose several
# of them at once. While a suspect runs alone, all other streams of its stage-0 replica
# wait for its steps.
STREAM_RULE = LossRule(suspect_after=2, unbegun=3, apart_s=2.0, proof=PROOF_TOKENS)


@dataclass(slots=True)
class LossLedger:
    """Losses of one piece of work since it last made enough progress."""

    rule: LossRule
    counted: int = 0  # number of losses that count
    isolated: int = 0  # counted losses in isolation
    shared: int = 0  # counted losses in isolation that other work may have caused
    last_at: float = -math.inf  # monotonic time of the last counted loss
    unbegun: int = 0  # losses in a row before anything was computed, not counted
    was_crowded: bool = False  # the first loss of a crowd was not counted
    progress: int = 0  # since the last loss
    # Whether anything was computed since the last loss, or may have been.
    has_begun: bool = False
    # Monotonic time before which no attempt starts. A suspect waits until another loss
    # would count; otherwise it could kill several replicas until then.
    not_before: float = -math.inf

    def add(
        self, now: float, *, is_alone: bool, is_shared: bool = False, together: int = 1
    ) -> bool:
        """Record the loss of a replica; return whether it counts."""
        # ``is_alone``: the replica computed nothing else. ``is_shared``: the work ran
        # in isolation, but other work may have caused the loss. ``together``: number of
        # pieces of work that the replica computed.
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
        """Record afterwards that the last loss was one in isolation."""
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
