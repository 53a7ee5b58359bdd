"""Losses of replicas with one piece of work, and what follows from them. Pure.

Work that kills what computes it must be found; work whose host dies must not be
suspected. After some losses the work is a *suspect* and runs in isolation. If replicas
die while it runs alone, it is *poison*, and is refused. Losses before anything was
computed have another cause, and losses in quick succession are more likely one fault
than two; neither counts again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

POISON_LOSSES = 2
"""Losses in isolation, without progress in between, that make work poison. Losing a
host never does: a loss while it ran beside other work only makes it a suspect."""


@dataclass(frozen=True, slots=True)
class LossRule:
    """Parameters of a loss rule, which differ between requests and streams.

    Attributes:
        suspect_after: Losses that count until the work runs in isolation.
        unbegun: Losses in a row, before anything was computed, that do not count.
        apart_s: Seconds between two losses that both count.
    """

    suspect_after: int
    unbegun: int
    apart_s: float


REQUEST_RULE = LossRule(suspect_after=1, unbegun=1, apart_s=0.0)
"""For requests with one answer. One replica holds a request at a time, and says when it
begins to compute it; running one alone costs the others one short batch."""

STREAM_RULE = LossRule(suspect_after=2, unbegun=3, apart_s=2.0)
"""For streams. A chain of replicas holds one, so a host may take several at once; while
a suspect runs alone, all other streams of its stage-0 replica wait for its steps."""


@dataclass(slots=True)
class LossLedger:
    """Losses of one piece of work since it last made progress.

    Attributes:
        rule: Which losses count.
        counted: Losses that count.
        isolated: Those of them in isolation.
        last_at: Monotonic time of the last loss that counts.
        unbegun: Losses that did not count because nothing had been computed.
        has_begun: Whether anything was computed since the last loss, or may have been.
        not_before: Monotonic time of the next attempt. A suspect waits until the next
            loss would count, or it could take one replica after another meanwhile.
    """

    rule: LossRule
    counted: int = 0
    isolated: int = 0
    last_at: float = -math.inf
    unbegun: int = 0
    has_begun: bool = False
    not_before: float = -math.inf

    def add(self, now: float, *, is_alone: bool) -> None:
        """Record the loss of a replica that held the work.

        Args:
            now: Monotonic time in seconds.
            is_alone: The replica was computing this work and nothing else.
        """
        has_begun, self.has_begun = self.has_begun, False
        if not has_begun and self.unbegun < self.rule.unbegun:
            self.unbegun += 1
            return
        if now - self.last_at < self.rule.apart_s:
            self.not_before = self.last_at + self.rule.apart_s
            return
        self.counted += 1
        self.isolated += is_alone
        self.last_at = now
        if self.is_suspect:
            self.not_before = now + self.rule.apart_s

    def clear(self) -> None:
        """Forget all losses: the work made progress."""
        self.counted = self.isolated = self.unbegun = 0
        self.has_begun = True
        self.not_before = -math.inf

    @property
    def is_suspect(self) -> bool:
        """True if the work must run in isolation."""
        return self.counted >= self.rule.suspect_after

    @property
    def is_poison(self) -> bool:
        """True if the work must not run again."""
        return self.isolated >= POISON_LOSSES
