"""Engine of a replica: runs the stage engine in a separate thread, does the chores
before each step, and exits the process if a step hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from multiworld.serve.deadlines import HUNG_S
from multiworld.serve.engine.compute.layer_code import can_run
from multiworld.serve.engine.compute.prefix_blocks import Block, BlockSpan
from multiworld.serve.engine.compute.stage_engine import (
    Chores,
    Computed,
    StageEngine,
    engine_of,
)
from multiworld.serve.engine.compute.transfers import Transfers
from multiworld.serve.engine.models import compiled_code, integer_products
from multiworld.serve.replica.compute_thread import ComputeThread
from multiworld.serve.replica.hang_guard import HangGuard, exit_hung
from multiworld.serve.replica.sequences.short_steps import ShortSteps
from multiworld.serve.replica.sequences.thread_count import ThreadCount
from multiworld.serve.spec.stage import Generation, Stage, StageContext
from multiworld.serve.text.grammar import Matcher, Matchers
from multiworld.serve.wire.generation_messages import SequenceStart, StepPart
from multiworld.serve.wire.protocol import StreamId

logger = logging.getLogger("multiworld.serve")


class Engine:
    """Computes one step at a time, after the chores that are due."""

    def __init__(
        self,
        stage: Stage,
        is_last: bool,
        threads: int,
        model: Generation,
        compute_s: float | None,
        is_deterministic: bool,
        clock: Callable[[], float],
        # Number of tokens for which to allocate KV memory at the start, on a GPU.
        tokens: int = 0,
    ) -> None:
        self._stage, self._threads, self._model = stage, threads, model
        self._compute_s, self._clock = compute_s or HUNG_S, clock
        self._is_deterministic, self._tokens = is_deterministic, tokens
        self._guard = HangGuard(self._exit_if_hung)
        self._thread: ComputeThread | None = None
        self._is_last = is_last
        self._stage_engine: StageEngine | None = None
        self._free: list[StreamId] = []
        self._drop: list[StreamId] = []
        self._open: dict[StreamId, SequenceStart] = {}
        self._restore: dict[StreamId, tuple[Sequence[Block], int]] = {}
        self._matchers = Matchers(model)
        self._structures: dict[StreamId, Matcher] = {}
        # Monotonic time at which the running step began; None: no step runs.
        self.began_at: float | None = None
        self.computed_s = 0.0
        self._short = ShortSteps()
        self._may_compute_here = False
        # Adapts the number of threads; None: the number never changes.
        self._count: ThreadCount | None = None

    async def load(self, context: StageContext) -> None:
        """Load the stage; call ``close`` if this is cancelled."""
        self._thread = ComputeThread()
        if context.device == "cpu" and self._threads == 1:
            # With more threads, this thread and the compute thread would each have an
            # OpenMP team. The teams would wait for each other in system calls, and a
            # step would take twice as long.
            torch.set_num_threads(1)
            self._may_compute_here = True
        elif context.device == "cpu" and not self._is_deterministic:
            self._count = ThreadCount(self._threads)
        await self._thread.call(self._load, context)

    def _load(self, context: StageContext) -> None:
        torch.set_num_threads(self._threads)
        if context.device == "cpu":
            # Compile the C code before the weights are in memory, because a compiler
            # needs 100 MB, too.
            can_run()
            compiled_code.outcome(integer_products.SOURCE)
        with torch.inference_mode():
            function: Any = self._stage.load(context)
        self._stage_engine = engine_of(
            function,
            is_last=self._is_last,
            model=self._model,
            is_deterministic=self._is_deterministic,
            transfers=Transfers(torch.device(context.device)),
            tokens=self._tokens,
        )
        self._guard.start()

    def _exit_if_hung(self, resumed_at: float) -> None:
        """Exit if the running step counts as hung; any thread may call it."""
        began = self.began_at
        if began is None:
            return
        # ``resumed_at`` is the time at which this process last resumed after a pause.
        if self._clock() - max(began, resumed_at) > self._compute_s:
            logger.error("a step takes more than %g s: it hangs", self._compute_s)
            exit_hung()

    def close(self) -> None:
        """Stop, without waiting for a running computation."""
        if self._thread is not None:
            self._thread.close()

    async def compute(
        self, parts: Sequence[StepPart], rows: Tensor, spans: Sequence[BlockSpan] = ()
    ) -> Computed:
        """Compute a step, and copy blocks that it completes; cancelling stops neither.

        A short step is computed in the calling thread.
        """
        assert self._thread is not None
        began_at = self.began_at = self._clock()
        work = self._chores(), parts, rows, spans
        try:
            if self._may_compute_here and self._short.is_short(len(rows)):
                return self._run(*work)
            return await self._thread.call(self._run, *work)
        finally:
            self.began_at = None
            took_s = self._clock() - began_at
            self.computed_s += took_s
            self._short.add(len(rows), took_s)

    async def tidy(self) -> None:
        """Free finished sequences now, without waiting for a step to do so."""
        if self._free and self._thread is not None and self._stage_engine is not None:
            await self._thread.call(self._stage_engine.tidy, self._chores())

    def open(self, start: SequenceStart) -> Future[Any] | None:
        """Start a sequence, or another attempt of it, before the next step."""
        stream, grammar = start.key[:2], start.sampling.grammar
        self._open[stream] = start
        if not grammar or not self._is_last:
            return None
        if stream not in self._structures:
            has_output = len(start.tokens) > start.prompt
            self._structures[stream] = self._matchers.begin(
                grammar, start.share, has_output=has_output
            )
        # This future is done once the grammar is compiled. Until then, a step with the
        # sequence would block.
        return self._structures[stream].made

    def restore(self, stream: StreamId, blocks: Sequence[Block], tokens: int) -> None:
        """Start a sequence with cached blocks (at least one) of ``tokens`` tokens."""
        self._restore[stream] = blocks, tokens

    @property
    def granule(self) -> int:
        """Tokens in multiples of which KV memory is allocated."""
        return 1 if self._stage_engine is None else self._stage_engine.cache.granule

    def free(self, stream: StreamId) -> None:
        """Remove a sequence before the next step."""
        self._open.pop(stream, None)
        self._restore.pop(stream, None)
        structure = self._structures.pop(stream, None)
        if structure is not None:
            # A waiting compilation is then skipped, so that others do not wait for it.
            structure.made.cancel()
        self._free.append(stream)

    def drop(self, stream: StreamId) -> None:
        """Free the KV blocks of a sequence before the next step; keep its state."""
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
        if self._count is not None:
            self._set_threads(self._count.next(self._clock()))
        self._stage_engine.tidy(chores)
        found = self._stage_engine.compute(parts, rows)
        return self._stage_engine.with_blocks(found, spans) if spans else found

    def _set_threads(self, count: int) -> None:
        before = torch.get_num_threads()
        if count != before:
            torch.set_num_threads(count)
            why = "trying all threads again"
            if count < before:
                why = "other processes take the cores"
            logger.info(
                "this stage computes with %d of %d threads: %s",
                count,
                self._threads,
                why,
            )

    def _chores(self) -> Chores:
        opened = [(each, self._structures.get(s)) for s, each in self._open.items()]
        chores = Chores(self._free, self._drop, opened, self._restore)
        self._free, self._drop, self._open, self._restore = [], [], {}, {}
        return chores
