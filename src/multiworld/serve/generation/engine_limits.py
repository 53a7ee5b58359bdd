"""Limits of one replica of stage 0. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

GROWTH = 1.25
"""Ratio of two successive sizes of a growing sequence's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of one replica of stage 0.

    Attributes:
        max_num_seqs: Maximum number of running sequences.
        max_num_batched_tokens: Maximum tokens of a step.
        steps: Maximum number of steps in flight; the number of stages.
        is_prefill_chunked: Whether a prompt may be computed in several steps.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    blocks: int = 1024
    steps: int = 1
    is_prefill_chunked: bool = True

    def blocks_of(self, tokens: int, granule: int = 1) -> int:
        """Return the blocks for a number of tokens, in multiples of ``granule``."""
        needed = math.ceil(tokens / self.block_size)
        whole = math.ceil(tokens / granule) * granule
        return max(needed, min(self.blocks, math.ceil(whole / self.block_size)))
