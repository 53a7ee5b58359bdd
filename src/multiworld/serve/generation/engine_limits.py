"""Limits of one replica of stage 0. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

GROWTH = 1.25
"""Factor between two sizes of the memory of a sequence that grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of one replica of stage 0.

    Attributes:
        max_num_seqs: Most sequences that run at once.
        max_num_batched_tokens: Most tokens of a step.
        block_size: Tokens of a block.
        blocks: Number of blocks.
        steps: Most steps under way at once; as many as there are stages.
        is_prefill_chunked: Whether a prompt may be computed in several steps.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    blocks: int = 1024
    steps: int = 1
    is_prefill_chunked: bool = True

    def blocks_of(self, tokens: int, granule: int = 1) -> int:
        """Return the number of blocks that a number of tokens needs.

        One sequence may always have all of them, though they are no whole granules.

        Args:
            tokens: The number of tokens.
            granule: Tokens in multiples of which a sequence takes memory.
        """
        least = math.ceil(tokens / self.block_size)
        whole = math.ceil(tokens / granule) * granule
        return max(least, min(self.blocks, math.ceil(whole / self.block_size)))
