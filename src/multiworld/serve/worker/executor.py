"""Runs a stage on batches, in a thread of its own. A bad row fails its row only."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence

import torch

from multiworld.errors import InvalidRequestError, ModelFailedError, ServeError
from multiworld.serve.spec.stage import Stage, StageContext, StageFunction, Tensors
from multiworld.serve.transport.collation import collate, length_of, split
from multiworld.serve.worker.batch_queue import Work
from multiworld.serve.worker.compute_thread import ComputeThread

logger = logging.getLogger("multiworld.serve")

Outcome = Tensors | ServeError


class Executor:
    """One stage, loaded.

    Args:
        stage: What to load.
        name: Of the stage, in messages to people.
        threads: Threads that torch uses for one operation.
    """

    def __init__(self, stage: Stage, name: str, threads: int) -> None:
        self._stage, self._name, self._threads = stage, name, threads
        self._thread: ComputeThread | None = None
        self._function: StageFunction | None = None
        self._share: Callable[[Tensors], None] | None = None

    @property
    def stage(self) -> Stage:
        """What runs here."""
        return self._stage

    async def compute(self, batch: Tensors) -> None:
        """Compute a batch that another rank answers for.

        Raises:
            ModelFailedError, InvalidRequestError: The model's own code raised.

        Cancellation: the computation goes on in its thread, for nobody.
        """
        assert self._thread is not None
        await self._thread.call(self._compute_shared, batch)

    def _compute_shared(self, batch: Tensors) -> None:
        assert self._function is not None
        try:
            with torch.inference_mode():
                self._function(batch)
        except Exception as error:
            raise self._translated(error) from error

    async def load(self, context: StageContext) -> None:
        """Load it.

        Raises:
            Exception: What the model's own code raises.

        Cancellation: loading goes on in its thread.
        """
        self._thread = ComputeThread()
        await self._thread.call(self._load, context)

    def _load(self, context: StageContext) -> None:
        torch.set_num_threads(self._threads)
        self._share = getattr(context.group, "share", None)
        with torch.inference_mode():
            self._function = self._stage.load(context)

    async def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Compute a batch; return for each piece of work its outputs, or its error.

        Cancellation: the computation goes on in its thread, for nobody.
        """
        assert self._thread is not None
        requests = [work.content for work in batch]
        rows = [work.rows for work in batch]
        return await self._thread.call(self._run, requests, rows)

    def _run(self, requests: list[Tensors], rows: list[int]) -> list[Outcome]:
        try:
            return [*self._compute(requests, rows)]
        except Exception as error:
            if len(requests) == 1:
                return [self._translated(error)]
        # Somebody's row is bad: see whose.
        return [
            outcome
            for request, count in zip(requests, rows, strict=True)
            for outcome in self._run([request], [count])
        ]

    def _compute(self, requests: list[Tensors], rows: list[int]) -> list[Tensors]:
        assert self._function is not None
        ragged = self._stage.ragged
        lengths = [length_of(request, ragged) for request in requests]
        with torch.inference_mode():
            batch = collate(requests, ragged, self._stage.buckets)
            if self._share is not None:
                self._share(batch)
            outputs = self._function(batch)
            return split(outputs, rows, lengths, ragged, self._name)

    def _translated(self, error: Exception) -> ServeError:
        if isinstance(error, InvalidRequestError | ModelFailedError):
            return error
        logger.warning(
            "stage %s raised for one request:\n%s",
            self._name,
            "".join(traceback.format_exception(error)),
        )
        return ModelFailedError(
            f"stage {self._name!r} raised {type(error).__name__}: {error}",
            stage=self._name,
        )

    def close(self) -> None:
        """End the thread; what it computes is not waited for."""
        if self._thread is not None:
            self._thread.close()
