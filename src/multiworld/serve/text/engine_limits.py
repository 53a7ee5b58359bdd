"""Limits of one replica of stage 0. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

GROWTH = 1.25  # factor by which the memory of a growing sequence is enlarged


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    max_num_seqs: int = 64  # maximum sequences that run at once
    max_num_batched_tokens: int = 512  # maximum tokens of a step
    block_size: int = 16
    blocks: int = 1024
    steps: int = 1  # maximum steps in flight: the number of stages

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that fits into memory."""
        return (self.blocks - 1) * self.block_size

    def blocks_of(self, tokens: int, granule: int = 1) -> int:
        """Return the KV blocks for ``tokens``, rounded up to ``granule`` tokens."""
        needed = math.ceil(tokens / self.block_size)
        whole = math.ceil(tokens / granule) * granule
        return max(needed, min(self.blocks, math.ceil(whole / self.block_size)))
