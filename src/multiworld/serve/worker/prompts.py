"""Beginnings of prompts at one stage: the known ones, and those to keep. Shell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from multiworld.serve.generation.links import StreamId
from multiworld.serve.generation.prefix_cache import Block, PrefixCache
from multiworld.serve.generation.prefixes import Digest, digests
from multiworld.serve.transport.generation_messages import Opening, StepPart


class Prompts:
    """The prompts of one replica.

    Args:
        limit: Most bytes of the beginnings that are kept; 0: none.
        block: Tokens of a block.
        counts: Counts tokens of prompts, and those of them that were known.
    """

    def __init__(self, limit: int, block: int, counts: Counter[str]) -> None:
        self._cache = PrefixCache(limit) if limit else None
        self._block, self._counts = block, counts
        self._names: dict[StreamId, list[Digest]] = {}

    def recall(self, opening: Opening) -> list[Block]:
        """Return the blocks with which a sequence may begin."""
        if self._cache is None or opening.is_probe:
            return []
        names = list(digests(opening.tokens, self._block, opening.share.tenant))
        self._names[opening.key[:2]] = names
        if opening.sampling.prompt_logprobs is not None:
            return []  # all of its tokens are to be scored
        # The last token is always computed, because it gives the next one.
        found = self._cache.find(names[: (len(opening.tokens) - 1) // self._block])
        self._counts["prefix_cache_queries"] += len(opening.tokens)
        self._counts["prefix_cache_hits"] += len(found) * self._block
        return found

    def fresh(self, part: StepPart) -> Iterator[tuple[Digest, int, int]]:
        """Yield the blocks to keep that a part of a step has completed.

        Args:
            part: The part.

        Yields:
            The name of a block, its first token, and the one after its last.
        """
        names = self._names.get(part.key[:2], ())
        end = min(len(names), (part.begin + part.count) // self._block)
        for number in range(part.begin // self._block, end):
            if self._cache is not None and not self._cache.has(names[number]):
                begin = number * self._block
                yield names[number], begin, begin + self._block

    def keep(self, name: Digest, block: Block) -> None:
        """Keep a block."""
        if self._cache is not None:
            self._cache.put(name, block)

    def forget(self, stream: StreamId) -> None:
        """Forget the names of a sequence's prefixes."""
        self._names.pop(stream, None)
