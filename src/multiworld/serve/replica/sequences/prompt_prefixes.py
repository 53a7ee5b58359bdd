"""Prefix caching of prompts at one stage."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from multiworld.serve.engine.compute.prefix_blocks import Block, BlockSpan
from multiworld.serve.replica.sequences.activation_log import ActivationLog
from multiworld.serve.replica.sequences.engine import Engine
from multiworld.serve.replica.sequences.sequence_state import SequenceState
from multiworld.serve.text.prefixes import Digest, digests
from multiworld.serve.wire.generation_messages import StepPart
from multiworld.serve.wire.protocol import StreamId


class PromptPrefixes:
    """The prompts of one replica, and its prefix cache of at most ``limit`` bytes."""

    def __init__(self, limit: int, block: int) -> None:
        self._cache, self._is_on = PrefixCache(limit), limit > 0
        self._block = block
        self.counts: Counter[str] = Counter()
        self._names: dict[StreamId, list[Digest]] = {}
        self._found: dict[StreamId, list[Block]] = {}

    def find(self, state: SequenceState) -> None:
        """Look up the cached prefix of a sequence's prompt."""
        start = state.start
        if not self._is_on or start.is_probe:
            return
        self.release(state.stream)
        names = list(digests(start.tokens, self._block, start.share.tenant))
        self._names[state.stream] = names
        if start.sampling.prompt_logprobs is not None:
            return  # all tokens of the prompt must be computed, because they are scored
        self.counts["prefix_cache_queries"] += len(start.tokens)
        # The last prompt token is always computed, because its output gives the next
        # token.
        found = self._cache.use(names[: (len(start.tokens) - 1) // self._block])
        # The blocks are copied only in ``restore``, so that a waiting sequence takes no
        # memory.
        if found:
            self._found[state.stream], state.is_cached = found, True
            state.held = state.logged = len(found) * self._block

    def restore(self, state: SequenceState, engine: Engine) -> list[Tensor]:
        """Restore a cached prefix before the next step; return its rows, by block."""
        held = state.held
        found = self._found.get(state.stream, [])[: -(-held // self._block)]
        self.release(state.stream)
        state.is_cached = False
        if not found:
            return []
        self.counts["prefix_cache_hits"] += held
        engine.restore(state.stream, found, held)
        # The rows of each block are [tokens, hidden]. In the last stage, blocks have no
        # rows.
        rows = [block.rows for block in found if block.rows is not None]
        if rows:
            rows[-1] = rows[-1][: held - (len(rows) - 1) * self._block]
        return rows

    def release(self, stream: StreamId) -> None:
        found = self._found.pop(stream, ())
        self._cache.release(self._names.get(stream, [])[: len(found)])

    def spans(self, parts: Iterable[StepPart]) -> list[BlockSpan]:
        """Return the prompt blocks that a step completes and the cache lacks."""
        found: dict[Digest, BlockSpan] = {}
        for part in parts:
            names = self._names.get(part.key[:2], ())
            end = min(len(names), (part.begin + part.count) // self._block)
            for number in range(part.begin // self._block, end):
                name, begin = names[number], number * self._block
                if not self._cache.has(name):
                    span = BlockSpan(part.key, name, begin, begin + self._block)
                    found.setdefault(name, span)
        return list(found.values())

    def keep(
        self, state: SequenceState, span: BlockSpan, block: Block, log: ActivationLog
    ) -> None:
        """Cache a copy of a block, with the rows of earlier steps from the log."""
        if block.rows is not None:
            missing = self._block - len(block.rows)
            if missing and span.begin < state.logged:
                return  # the missing rows are no longer in the log
            if missing:
                before = log.rows(state.stream, span.begin, span.begin + missing)
                block = Block(block.layers, torch.cat([before, block.rows]))
        self._cache.put(span.name, block)

    def forget(self, stream: StreamId) -> None:
        self.release(stream)
        self._names.pop(stream, None)


class PrefixCache:
    """LRU cache of blocks, by digest of their prefix, with at most ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: OrderedDict[Digest, Block] = OrderedDict()
        self._uses: Counter[Digest] = Counter()
        self.nbytes = 0

    def use(self, names: Iterable[Digest]) -> list[Block]:
        """Return the cached blocks of a prefix, which are in use until ``release``."""
        found: list[Block] = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            self._blocks.move_to_end(name)
            self._uses[name] += 1
            found.append(block)
        return found

    def release(self, names: Iterable[Digest]) -> None:
        """End the use of blocks that one call of ``use`` returned."""
        for name in names:
            self._uses[name] -= 1
            if not self._uses[name]:
                del self._uses[name]

    def has(self, name: Digest) -> bool:
        return name in self._blocks

    def put(self, name: Digest, block: Block) -> None:
        """Cache the last block of a prefix, if there is room."""
        if name in self._blocks or not self._make_room(block.nbytes):
            return
        self._blocks[name] = block
        self.nbytes += block.nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Drop least recently used blocks not in use; return whether that suffices."""
        if nbytes > self._limit:
            return False
        excess, dropped = self.nbytes + nbytes - self._limit, list[Digest]()
        for name, block in self._blocks.items() if excess > 0 else ():
            if name not in self._uses:
                dropped.append(name)
                excess -= block.nbytes
                if excess <= 0:
                    break
        for name in dropped:
            self.nbytes -= self._blocks.pop(name).nbytes
        return excess <= 0
