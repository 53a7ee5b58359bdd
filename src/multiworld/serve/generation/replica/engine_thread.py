"""The engine of a replica in its thread, which ends the process if it hangs."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from multiworld.serve.generation.grammar import Matcher, Matchers
from multiworld.serve.generation.replica.prefix_cache import Block
from multiworld.serve.generation.replica.recovery import StreamId
from multiworld.serve.generation.replica.stage_engine import (
    Chores,
    Computed,
    StageEngine,
    engine_of,
)
from multiworld.serve.replica.compute_thread import ComputeThread
from multiworld.serve.replica.hang_guard import EXIT_HUNG, HangGuard
from multiworld.serve.spec.stage import Generation, Stage, StageContext
from multiworld.serve.transport.generation_messages import Opening, StepPart

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values by layer."""

logger = logging.getLogger("multiworld.serve")

HUNG_S = 30.0
"""Seconds after which a step is taken to hang. A stage with larger steps says so with
``compute_s``."""


class EngineThread:
    """Computes one step at a time; what is to be freed is freed before the next.

    Args:
        stage: The stage.
        is_last: Whether it is the last one.
        threads: Threads that torch uses for one operation.
        model: Facts about the model.
        compute_s: Most seconds for one step; None: ``HUNG_S``.
        is_deterministic: Whether results are not to depend on the batch.
        clock: Returns the monotonic time in seconds.

    Attributes:
        began_at: Time at which the running step began; None if none runs.
        computed_s: Total computing time, in seconds.
    """

    def __init__(
        self,
        stage: Stage,
        is_last: bool,
        threads: int,
        model: Generation,
        compute_s: float | None,
        is_deterministic: bool,
        clock: Callable[[], float],
    ) -> None:
        self._stage, self._is_last, self._threads = stage, is_last, threads
        self._model, self._compute_s = model, compute_s or HUNG_S
        self._clock, self._is_deterministic = clock, is_deterministic
        self._guard = HangGuard(self._end_if_hung)
        self._thread: ComputeThread | None = None
        self._engine: StageEngine | None = None
        self._free: list[StreamId] = []
        self._drop: list[StreamId] = []
        self._open: dict[StreamId, Opening] = {}
        self._restore: dict[StreamId, tuple[Sequence[Block], int]] = {}
        self._matchers = Matchers(model)
        self._structures: dict[StreamId, Matcher] = {}
        self.began_at: float | None = None
        self.computed_s = 0.0

    async def load(self, context: StageContext) -> None:
        """Load the stage, in its thread.

        Raises:
            Exception: Any error that the model's code raises.

        Cancellation: Loading goes on in its thread; call ``close`` afterwards.
        """
        self._thread = ComputeThread()
        await self._thread.call(self._load, context)

    def _load(self, context: StageContext) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            function: Any = self._stage.load(context)
        self._engine = engine_of(
            function,
            is_last=self._is_last,
            model=self._model,
            is_deterministic=self._is_deterministic,
        )
        self._guard.start()

    def _end_if_hung(self, resumed_at: float) -> None:
        """Exit the process if the running step is taken to hang; any thread calls it.

        The gateways see it at once, and compute its sequences elsewhere.

        Args:
            resumed_at: End of the last pause of this process.
        """
        began = self.began_at
        if began is None:
            return
        if self._clock() - max(began, resumed_at) > self._compute_s:
            logger.error("a step takes more than %g s: it hangs", self._compute_s)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(EXIT_HUNG)

    def close(self) -> None:
        """Stop the thread, without waiting for a running computation."""
        if self._thread is not None:
            self._thread.close()

    def open(self, opening: Opening) -> Future[Any] | None:
        """Let a sequence begin, or go on as another attempt, before the next step.

        Returns:
            Done once its structure was compiled, in the last stage; None if it has
            none. A step with it waits for that, and everybody else with it.
        """
        stream, grammar = opening.key[:2], opening.sampling.grammar
        self._open[stream] = opening
        if not grammar or not self._is_last:
            return None
        if stream not in self._structures:
            self._structures[stream] = self._matchers.begin(grammar)
        return self._structures[stream].made

    def restore(self, stream: StreamId, blocks: Sequence[Block], tokens: int) -> None:
        """Let a sequence begin with blocks that were computed before.

        Args:
            stream: The sequence.
            blocks: Its first blocks, at least one.
            tokens: Number of their tokens.
        """
        self._restore[stream] = blocks, tokens

    @property
    def granule(self) -> int:
        """Tokens in multiples of which keys and values take memory."""
        return 1 if self._engine is None else self._engine.cache.granule

    def copied(self, stream: StreamId, begin: int, end: int) -> Layers:
        """Return a copy of keys and values of a sequence, while no step runs.

        Args:
            stream: The sequence.
            begin: Position of the first token.
            end: Position after the last token.
        """
        assert self._engine is not None
        assert self.began_at is None
        return self._engine.cache.copied(stream, begin, end)

    def free(self, stream: StreamId) -> None:
        """Forget a sequence before the next step."""
        self._open.pop(stream, None)
        self._restore.pop(stream, None)
        self._structures.pop(stream, None)
        self._free.append(stream)

    def drop(self, stream: StreamId) -> None:
        """Drop the keys and values of a sequence before the next step."""
        self._restore.pop(stream, None)
        self._drop.append(stream)

    async def compute(self, parts: Sequence[StepPart], rows: Tensor) -> Computed:
        """Compute a step.

        Args:
            parts: Its parts; each has rows.
            rows: Token ids, [rows], or hidden states, [rows, hidden].

        Cancellation: The computation goes on in its thread; its result is dropped.
        """
        assert self._thread is not None
        began_at = self.began_at = self._clock()
        try:
            return await self._thread.call(self._run, self._chores(), parts, rows)
        finally:
            self.began_at = None
            self.computed_s += self._clock() - began_at

    async def tidy(self) -> None:
        """Forget what is to be forgotten, if there is no step to do it before.

        Cancellation: Safe.
        """
        if self._free and self._thread is not None and self._engine is not None:
            await self._thread.call(self._engine.tidy, self._chores())

    def _run(self, chores: Chores, parts: Sequence[StepPart], rows: Tensor) -> Computed:
        assert self._engine is not None
        self._engine.tidy(chores)
        return self._engine.compute(parts, rows)

    def _chores(self) -> Chores:
        opened = [(each, self._structures.get(s)) for s, each in self._open.items()]
        chores = Chores(self._free, self._drop, opened, self._restore)
        self._free, self._drop, self._open, self._restore = [], [], {}, {}
        return chores


def when_made(made: Future[Any] | None, call: Callable[[], None]) -> None:
    """Call a function of this loop once a structure was compiled.

    Args:
        made: From ``EngineThread.open``; None: there is none, so call it now.
        call: The function.
    """
    if made is None or made.done():
        call()
        return
    loop = asyncio.get_running_loop()
    made.add_done_callback(lambda _: loop.call_soon_threadsafe(call))
