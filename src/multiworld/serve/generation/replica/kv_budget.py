"""Memory for keys and values in a stage after the first. Pure.

Stage 0 counts the blocks of the sequences that it schedules. But several replicas of
stage 0 may share one of a later stage, and after a loss more sequences come to it than
before. So every stage enforces its own limit: what does not fit is dropped, and stage 0
preempts it. All stages agree on what is dropped first, so at least one sequence is
computed in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class KvBudget(Generic[K]):
    """Blocks that the sequences of one stage have.

    Args:
        blocks: Number of blocks.
        blocks_of: Returns the blocks that a number of tokens needs.
        rank: Returns the rank of a sequence; the highest is dropped first.
    """

    def __init__(
        self, blocks: int, blocks_of: Callable[[int], int], rank: Callable[[K], Any]
    ) -> None:
        self._limit, self._blocks_of, self._rank = blocks, blocks_of, rank
        self._blocks: dict[K, int] = {}
        self.used = 0

    def take(self, wanted: Mapping[K, int]) -> list[K]:
        """Give sequences the blocks for some tokens.

        Args:
            wanted: Number of tokens of each sequence that is to be computed.

        Returns:
            Sequences that are dropped for others, or have no room; they have no blocks
            now. One sequence is never dropped for itself.
        """
        for sequence, tokens in wanted.items():
            needed = self._blocks_of(tokens)
            more = max(0, needed - self._blocks.get(sequence, 0))
            self._blocks[sequence] = self._blocks.get(sequence, 0) + more
            self.used += more
        dropped: list[K] = []
        if self.used > self._limit:
            for sequence in sorted(self._blocks, key=self._rank, reverse=True):
                if self.used <= self._limit or len(self._blocks) == 1:
                    break
                self.free(sequence)
                dropped.append(sequence)
        return dropped

    def free(self, sequence: K) -> None:
        """Take back the blocks of a sequence, if it has any."""
        self.used -= self._blocks.pop(sequence, 0)
