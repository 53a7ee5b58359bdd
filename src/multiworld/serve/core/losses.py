"""Replicas that were lost with one stream, and what follows from that. Pure.

A stream that kills what computes it must be found, and a stream whose host dies is not
one. Two losses in quick succession are more likely one fault than two, and a loss
before anything was computed has another cause. So neither is counted again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

POISON_LOSSES = 3
"""Replicas that die while they compute a stream alone, without a token in between,
after which it is poison. Those that had it among others do not count: losing a host
never marks a stream as poison."""

SUSPECT_LOSSES = 2
"""Losses in a row after which a stream is computed alone, until it has a token."""

UNBEGUN_LOSSES = 3
"""Losses in a row before anything was computed that do not count: it may be what
comes before computing that ends the replicas."""

APART_S = 2.0
"""Seconds between two losses that both count."""


@dataclass(slots=True)
class Losses:
    """Losses of one stream since its last token.

    Attributes:
        counted: Losses that count.
        isolated: Those of them in which the stream was computed alone.
        last_at: Monotonic time of the last loss that counts.
        unbegun: Losses that did not count because nothing was computed before.
        has_begun: Whether anything of it was computed since the last loss.
        not_before: Monotonic time of the next attempt. A stream that may be the cause
            of a loss waits until the next loss would count, or it could take one
            replica after the other meanwhile.
    """

    counted: int = 0
    isolated: int = 0
    last_at: float = -math.inf
    unbegun: int = 0
    has_begun: bool = False
    not_before: float = -math.inf

    def add(self, now: float, *, is_alone: bool) -> None:
        """Count the loss of a replica that the stream had.

        Args:
            now: Monotonic time in seconds.
            is_alone: Whether the stream was computed then, and nothing else was.
        """
        has_begun, self.has_begun = self.has_begun, False
        if self.counted and not has_begun and self.unbegun < UNBEGUN_LOSSES:
            self.unbegun += 1
            return
        if now - self.last_at < APART_S:
            self.not_before = self.last_at + APART_S
            return
        self.counted += 1
        self.isolated += is_alone
        self.last_at = now
        if self.is_suspect:
            self.not_before = now + APART_S

    def clear(self) -> None:
        """Forget all losses: the stream has a new token."""
        self.counted = self.isolated = self.unbegun = 0
        self.not_before = -math.inf

    @property
    def is_suspect(self) -> bool:
        """True if the stream is to be computed alone."""
        return self.counted >= SUSPECT_LOSSES

    @property
    def is_poison(self) -> bool:
        """True if the stream is not to be computed again."""
        return self.isolated >= POISON_LOSSES
