"""KV budget of a stage after the first. Pure.

Stage 0 counts the blocks of its sequences. But several stage 0 replicas may share a
replica of a later stage, which also receives more sequences after a loss. So every
later stage drops sequences that do not fit, and stage 0 preempts them. All stages drop
sequences in the same order, so at least one sequence makes progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from multiworld.serve.wire.protocol import StreamId


class KvBudget:
    """Blocks of one stage's sequences; the highest rank is dropped first."""

    def __init__(
        self,
        blocks: int,
        blocks_of: Callable[[int], int],
        rank: Callable[[StreamId], Any],
    ) -> None:
        self._limit, self._blocks_of, self._rank = blocks, blocks_of, rank
        self._blocks: dict[StreamId, int] = {}
        self.used = 0

    def take(self, wanted: Mapping[StreamId, int]) -> list[StreamId]:
        """Allocate blocks; return the sequences dropped for them; keep at least one."""
        for sequence, tokens in wanted.items():
            needed = self._blocks_of(tokens)
            more = max(0, needed - self._blocks.get(sequence, 0))
            self._blocks[sequence] = self._blocks.get(sequence, 0) + more
            self.used += more
        dropped: list[StreamId] = []
        if self.used > self._limit:
            for sequence in sorted(self._blocks, key=self._rank, reverse=True):
                if self.used <= self._limit or len(self._blocks) == 1:
                    break
                self.free(sequence)
                dropped.append(sequence)
        return dropped

    def free(self, sequence: StreamId) -> None:
        self.used -= self._blocks.pop(sequence, 0)
