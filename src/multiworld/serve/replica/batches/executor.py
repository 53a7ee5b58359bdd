"""Executor: runs a stage on batches, in its own thread."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Sequence

import torch

from multiworld import errors
from multiworld.serve.engine.compute.device_health import exit_if_broken
from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.replica.compute_thread import ComputeThread
from multiworld.serve.spec.stage import Stage, StageContext, StageFunction, Tensors
from multiworld.serve.wire.collation import collate, lengths_of, split
from multiworld.serve.wire.protocol import wording_of

logger = logging.getLogger("multiworld.serve")

# Errors after which the ranks of a replica can no longer work together.
LOST = (errors.WorldBrokenError, errors.WorldClosedError, errors.MemberLeftError)

Outcome = Tensors | errors.ServeError  # outputs of one request, by name; or its error
WARM = 20  # minimum number of batches to measure before a stage counts as quick
QUICK_S = 0.0005  # maximum average seconds of a quick stage's batch
# Seconds. After a longer batch, its stage is not quick for ``WARM`` more batches.
SLOW_S = 0.005
LATEST_SHARE = 0.1  # weight of the latest batch in the average
# Minimum seconds between two logged errors, because clients can cause any number.
LOG_S = 1.0
MAX_TRACE = 8000  # maximum characters of a logged stack trace


class Quickness:
    """Moving average of a stage's computing time.

    A quick stage computes on the event loop, which saves passing each batch to a thread
    and back, and its batches are not announced before they are computed.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._measured = 0
        self.is_forbidden = False

    @property
    def is_quick(self) -> bool:
        is_little = self._measured >= WARM and self._mean_s <= QUICK_S
        return is_little and not self.is_forbidden

    def add(self, took_s: float) -> None:
        if took_s > SLOW_S:
            self._measured = 0
            self._mean_s = 0.0
            return
        self._measured += 1
        share = max(LATEST_SHARE, 1 / self._measured)
        self._mean_s += share * (took_s - self._mean_s)


class Executor:
    def __init__(self, stage: Stage, name: str, threads: int) -> None:
        self.stage, self._name, self._threads = stage, name, threads
        self._thread: ComputeThread | None = None
        self._quickness = Quickness()
        self._function: StageFunction | None = None
        self._device = "cpu"
        self._share: Callable[[Tensors], None] | None = None
        self._settle: Callable[[], None] | None = None
        self._logged_at, self._unlogged = -LOG_S, 0
        # Number of started calls of the stage's function; a batch needs at least one.
        self.calls = 0

    async def compute(self, batch: Tensors) -> None:
        assert self._thread is not None
        await self._thread.call(self._compute_shared, batch)

    def _compute_shared(self, batch: Tensors) -> None:
        try:
            with torch.inference_mode():
                self._call(batch)
        except LOST:
            raise
        except BaseException as error:
            # Every error is translated, for the reason given in ``_run``.
            raise self._translated(error) from error

    async def load(self, context: StageContext) -> None:
        """Load the stage, in its thread; call ``close`` if this is cancelled."""
        self._thread = ComputeThread()
        # Set the number of threads here, too: this thread computes in ``run_here``.
        torch.set_num_threads(self._threads)
        await self._thread.call(self._load, context)

    def _load(self, context: StageContext) -> None:
        torch.set_num_threads(self._threads)
        self._device = context.device
        self._share = getattr(context.group, "share", None)
        self._settle = getattr(context.group, "settle", None)
        with torch.inference_mode():
            self._function = self.stage.load(context)
        if getattr(self._function, "is_on_host", False):
            self._device = "cpu"

    async def run(self, batch: Sequence[Work]) -> list[Outcome]:
        """Compute a batch; return the outputs or the error of each piece of work."""
        # If the batch fails, it is halved until each failing request is alone. After an
        # error in ``LOST`` the replica must exit. Cancelling this call does not stop
        # the computation, but drops its results.
        assert self._thread is not None
        return await self._thread.call(self._run, batch)

    @property
    def is_quick(self) -> bool:
        """True if batches are so short that ``run_here`` costs less than ``run``."""
        return self._share is None and self._quickness.is_quick

    def run_here(self, batch: Sequence[Work]) -> list[Tensors] | None:
        """Compute a batch in the calling thread; None if it fails and needs ``run``."""
        requests = [work.content for work in batch]
        # Copy the input of a single request, because the stage may modify it and
        # ``run`` needs it after a failure. Several requests are copied into a batch
        # anyway.
        if len(requests) == 1:
            requests = [{name: t.clone() for name, t in requests[0].items()}]
        try:
            return self._compute(requests, [work.rows for work in batch])
        except KeyboardInterrupt:
            raise
        except BaseException:
            return None

    def needs_its_thread(self) -> None:
        """Disable ``run_here``: a batch that failed there succeeded in the thread."""
        logger.info("stage %s computes only in its own thread from now on", self._name)
        self._quickness.is_forbidden = True

    def _run(self, batch: Sequence[Work]) -> list[Outcome]:
        requests = [work.content for work in batch]
        try:
            return [*self._compute(requests, [work.rows for work in batch])]
        except LOST:
            raise
        # Whatever a model raises (even ``SystemExit`` or a Rust panic) fails only its
        # requests. If the error ended the process, the requests would be replayed on
        # another replica, and end its process, too.
        except BaseException as error:
            exit_if_broken(self._device, error)
            if self._settle is not None:
                self._settle()
            if len(batch) == 1:
                return [self._translated(error, batch[0].origin.request)]
        # Halve the batch to find the failing requests.
        half = len(batch) // 2
        return [*self._run(batch[:half]), *self._run(batch[half:])]

    def _compute(self, requests: list[Tensors], rows: list[int]) -> list[Tensors]:
        ragged = self.stage.ragged
        lengths = [lengths_of(request, ragged) for request in requests]
        with torch.inference_mode():
            batch = collate(requests, ragged, self.stage.buckets)
            if self._share is not None:
                self._share(batch)
            self.calls += 1
            began_at = time.perf_counter()
            outputs = self._call(batch)
            self._quickness.add(time.perf_counter() - began_at)
            return split(outputs, rows, lengths, ragged, self._name)

    def _call(self, batch: Tensors) -> Tensors:
        """Compute on the stage's device; inputs and outputs are on the host."""
        assert self._function is not None
        if self._device != "cpu":
            batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
        outputs = self._function(batch)
        if not isinstance(outputs, dict):  # ``split`` raises the error for this result
            return outputs
        return {
            name: self._own(tensor) if isinstance(tensor, torch.Tensor) else tensor
            for name, tensor in outputs.items()
        }

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the host: the stage may reuse its output's memory."""
        is_elsewhere = self._device != "cpu" and tensor.device.type != "cpu"
        return tensor.cpu() if is_elsewhere else tensor.clone()

    def _translated(self, error: BaseException, request: str = "") -> errors.ServeError:
        if isinstance(error, errors.InvalidRequestError | errors.ModelFailedError):
            return error
        self._log(error, request)
        return errors.ModelFailedError(
            f"stage {self._name!r} raised {type(error).__name__}: {wording_of(error)}",
            stage=self._name,
        )

    def _log(self, error: BaseException, request: str) -> None:
        now = time.perf_counter()
        if now - self._logged_at < LOG_S:
            self._unlogged += 1
            return
        trace = "".join(traceback.format_exception(error))
        if len(trace) > MAX_TRACE:
            trace = f"{trace[: MAX_TRACE // 2]}\n[...]\n{trace[-MAX_TRACE // 2 :]}"
        others = ""
        if self._unlogged:
            others = f" (and for {self._unlogged} earlier requests)"
        logger.warning(
            "stage %s raised an exception for one request%s:\n%s",
            self._name,
            others,
            trace,
            extra={"request": request},
        )
        self._logged_at, self._unlogged = now, 0

    def close(self) -> None:
        """Stop the thread, without waiting for a running computation."""
        if self._thread is not None:
            self._thread.close()
