"""The engine of a replica: its stage engine, and the chores before the next step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from multiworld.serve.generation.grammar import Matcher, Matchers
from multiworld.serve.generation.replica.prefix_cache import Block, BlockSpan
from multiworld.serve.generation.replica.sequence_state import StreamId
from multiworld.serve.generation.replica.stage_engine import (
    Chores,
    Computed,
    StageEngine,
)
from multiworld.serve.spec.stage import Generation, StageContext
from multiworld.serve.transport.generation_messages import SequenceStart, StepPart


class Engine:
    """Computes one step at a time, after the chores that are due."""

    def __init__(self, model: Generation, is_last: bool) -> None:
        self._is_last = is_last
        self._stage_engine: StageEngine | None = None
        self._free: list[StreamId] = []
        self._drop: list[StreamId] = []
        self._open: dict[StreamId, SequenceStart] = {}
        self._restore: dict[StreamId, tuple[Sequence[Block], int]] = {}
        self._matchers = Matchers(model)
        self._structures: dict[StreamId, Matcher] = {}
        self.began_at: float | None = None  # of the running step, monotonic
        self.computed_s = 0.0

    async def load(self, context: StageContext) -> None:
        """Load the stage; call ``close`` if this is cancelled."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop, without waiting for a running computation."""

    async def compute(
        self, parts: Sequence[StepPart], rows: Tensor, spans: Sequence[BlockSpan] = ()
    ) -> Computed:
        """Compute a step, and copy blocks that it completes; outlives a cancel."""
        raise NotImplementedError

    async def tidy(self) -> None:
        """Do the chores now, if sequences are to be freed and no step is due."""
        raise NotImplementedError

    def open(self, start: SequenceStart) -> Future[Any] | None:
        """Start a sequence, or another attempt of it, before the next step."""
        stream, grammar = start.key[:2], start.sampling.grammar
        self._open[stream] = start
        if not grammar or not self._is_last:
            return None
        if stream not in self._structures:
            self._structures[stream] = self._matchers.begin(grammar)
        # Done once its structure is compiled: a step that contains the sequence blocks
        # until then.
        return self._structures[stream].made

    def restore(self, stream: StreamId, blocks: Sequence[Block], tokens: int) -> None:
        """Start a sequence with cached blocks (at least one) of ``tokens`` tokens."""
        self._restore[stream] = blocks, tokens

    @property
    def granule(self) -> int:
        """Tokens in multiples of which KV memory is allocated."""
        return 1 if self._stage_engine is None else self._stage_engine.cache.granule

    def free(self, stream: StreamId) -> None:
        """Forget a sequence before the next step."""
        self._open.pop(stream, None)
        self._restore.pop(stream, None)
        structure = self._structures.pop(stream, None)
        if structure is not None:
            structure.made.cancel()  # so that others need not wait until it is compiled
        self._free.append(stream)

    def drop(self, stream: StreamId) -> None:
        """Free the KV blocks of a sequence before the next step."""
        self._restore.pop(stream, None)
        self._drop.append(stream)

    def _run(
        self,
        chores: Chores,
        parts: Sequence[StepPart],
        rows: Tensor,
        spans: Sequence[BlockSpan],
    ) -> Computed:
        assert self._stage_engine is not None
        self._stage_engine.tidy(chores)
        found = self._stage_engine.compute(parts, rows)
        return self._stage_engine.with_blocks(found, spans) if spans else found

    def _chores(self) -> Chores:
        opened = [(each, self._structures.get(s)) for s, each in self._open.items()]
        chores = Chores(self._free, self._drop, opened, self._restore)
        self._free, self._drop, self._open, self._restore = [], [], {}, {}
        return chores
