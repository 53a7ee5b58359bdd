"""Beginnings of prompts at one stage: the known ones, and those to keep."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from multiworld.serve.generation.prefixes import Digest, digests
from multiworld.serve.generation.replica.activation_log import RowLog
from multiworld.serve.generation.replica.engine_thread import EngineThread
from multiworld.serve.generation.replica.prefix_cache import Block, PrefixCache
from multiworld.serve.generation.replica.recovery import Link, StreamId
from multiworld.serve.transport.generation_messages import StepPart


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
        self._found: dict[StreamId, list[Block]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the beginnings that are kept."""
        return 0 if self._cache is None else self._cache.nbytes

    def find(self, link: Link) -> None:
        """Let a sequence have what is known of its prompt; it is so until ``restore``.

        Nothing is copied before: a sequence that waits for its turn takes no memory.
        """
        opening = link.opening
        if self._cache is None or opening.is_probe:
            return
        self.release(link.stream)
        names = list(digests(opening.tokens, self._block, opening.share.tenant))
        self._names[link.stream] = names
        if opening.sampling.prompt_logprobs is not None:
            return  # all of its tokens are to be scored
        self._counts["prefix_cache_queries"] += len(opening.tokens)
        # The last token is always computed, because it gives the next one.
        found = self._cache.use(names[: (len(opening.tokens) - 1) // self._block])
        if found:
            self._found[link.stream], link.is_known = found, True
            link.held = link.logged = len(found) * self._block

    def restore(self, link: Link, engine: EngineThread) -> Tensor | None:
        """Let a sequence begin with what is known of it, in the next step.

        Args:
            link: The sequence; it has what it is to begin with.
            engine: The engine.

        Returns:
            The output of the stage for those tokens, [tokens, hidden]; None if there
            are none, or in the last stage.
        """
        held = link.held
        found = self._found.get(link.stream, [])[: -(-held // self._block)]
        self.release(link.stream)
        link.is_known = False
        if not found:
            return None
        self._counts["prefix_cache_hits"] += held
        engine.restore(link.stream, found, held)
        rows = [block.rows for block in found if block.rows is not None]
        return torch.cat(rows)[:held] if rows else None

    def release(self, stream: StreamId) -> None:
        """Let go of the blocks that a sequence might have begun with."""
        found = self._found.pop(stream, ())
        if self._cache is not None:
            self._cache.release(self._names.get(stream, [])[: len(found)])

    def keep(
        self, link: Link, part: StepPart, engine: EngineThread, log: RowLog | None
    ) -> None:
        """Keep the blocks of a prompt that a part of a step has completed.

        Args:
            link: The sequence.
            part: The part.
            engine: The engine, which computes nothing now.
            log: Output of the stage; None in the last one.
        """
        names = self._names.get(link.stream, ())
        end = min(len(names), (part.begin + part.count) // self._block)
        for number in range(part.begin // self._block, end):
            if self._cache is None or self._cache.has(names[number]):
                continue
            begin, rows = number * self._block, None
            if log is not None:
                if begin < link.logged:
                    continue  # its output is not there any more
                rows = log.rows(link.stream, begin, begin + self._block)
            layers = engine.copied(link.stream, begin, begin + self._block)
            self._cache.put(names[number], Block(layers, rows))

    def forget(self, stream: StreamId) -> None:
        """Forget a sequence."""
        self.release(stream)
        self._names.pop(stream, None)
