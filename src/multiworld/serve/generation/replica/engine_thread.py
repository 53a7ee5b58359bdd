"""An engine in a thread of its own, which ends the process if it hangs."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multiworld.serve.generation.replica.engine import Engine
from multiworld.serve.generation.replica.prefix_cache import BlockSpan
from multiworld.serve.generation.replica.stage_engine import Computed, engine_of
from multiworld.serve.generation.replica.transfers import Transfers
from multiworld.serve.replica.compute_thread import ComputeThread
from multiworld.serve.replica.hang_guard import EXIT_HUNG, HangGuard
from multiworld.serve.spec.stage import Generation, Stage, StageContext
from multiworld.serve.transport.generation_messages import StepPart

logger = logging.getLogger("multiworld.serve")

HUNG_S = 30.0  # after which a step counts as hung; longer ones need ``compute_s``


class EngineThread(Engine):
    """Computes in its thread; exits the process if a step counts as hung."""

    def __init__(
        self,
        stage: Stage,
        is_last: bool,
        threads: int,
        model: Generation,
        compute_s: float | None,
        is_deterministic: bool,
        clock: Callable[[], float],
        pages: int = 0,  # of KV memory to allocate at first, on a GPU
    ) -> None:
        super().__init__(model, is_last)
        self._stage, self._threads, self._model = stage, threads, model
        self._compute_s, self._clock = compute_s or HUNG_S, clock
        self._is_deterministic, self._pages = is_deterministic, pages
        self._guard = HangGuard(self._exit_if_hung)
        self._thread: ComputeThread | None = None

    async def load(self, context: StageContext) -> None:
        self._thread = ComputeThread()
        await self._thread.call(self._load, context)

    def _load(self, context: StageContext) -> None:
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            function: Any = self._stage.load(context)
        self._stage_engine = engine_of(
            function,
            is_last=self._is_last,
            model=self._model,
            is_deterministic=self._is_deterministic,
            transfers=Transfers(torch.device(context.device)),
            pages=self._pages,
        )
        self._guard.start()

    def _exit_if_hung(self, resumed_at: float) -> None:
        """Exit if the running step counts as hung; any thread may call it."""
        began = self.began_at
        if began is None:
            return
        # ``resumed_at``: end of the last pause of this process.
        if self._clock() - max(began, resumed_at) > self._compute_s:
            logger.error("a step takes more than %g s: it hangs", self._compute_s)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(EXIT_HUNG)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    async def compute(
        self, parts: Sequence[StepPart], rows: Tensor, spans: Sequence[BlockSpan] = ()
    ) -> Computed:
        assert self._thread is not None
        began_at = self.began_at = self._clock()
        try:
            return await self._thread.call(
                self._run, self._chores(), parts, rows, spans
            )
        finally:
            self.began_at = None
            self.computed_s += self._clock() - began_at

    async def tidy(self) -> None:
        if self._free and self._thread is not None and self._stage_engine is not None:
            await self._thread.call(self._stage_engine.tidy, self._chores())
