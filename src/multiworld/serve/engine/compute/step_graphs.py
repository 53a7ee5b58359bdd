"""CUDA graphs of steps in which each sequence has one row.

The host takes several times as long to launch the kernels of such a step one by one as
the GPU takes to run them. A CUDA graph, which is recorded ("captured") once, launches
all of them at once. A graph computes a fixed number of rows over a fixed number of
pages, from tensors at fixed addresses. So a step is padded with rows that belong to no
sequence, and its page tables are padded with pages of zeros.

The first step of a padded shape is computed without a graph, which also initialises
libraries. The second step records a graph while it computes padding rows only. Then the
graph's result for the rows of the step is compared with a result computed without the
graph.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from multiworld.serve.engine.compute.kv_cache import Rows
from multiworld.serve.engine.compute.paged_kv_cache import (
    SCRATCH,
    ZERO,
    PagedKvCache,
    SingleRowsAttention,
)

logger = logging.getLogger("multiworld.serve")

Call = Callable[[], Tensor]
# Records the kernels that a call launches. Returns a call that launches them again and
# returns the same tensor.
Record = Callable[[Call], Call]

# Minimum number of pages of a sequence in a graph, so that all short sequences use the
# same graphs.
MIN_PAGES = 16
# Maximum number of tokens that a graph attends to, including padding: each graph keeps
# the memory for one layer's gathered keys and values.
MAX_TOKENS = 1 << 15


def recorder(device: torch.device) -> Record:
    """Return the recorder of a GPU."""
    # All its graphs share memory, so the caller must copy a graph's result before
    # another graph runs.
    last: weakref.ref[torch.cuda.CUDAGraph] | None = None
    stream: torch.cuda.Stream | None = None

    def record(call: Call) -> Call:
        nonlocal last, stream
        if stream is None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graph, other = torch.cuda.CUDAGraph(), None if last is None else last()
        # Use the memory pool of the latest graph that still exists: a pool is freed
        # together with the last of its graphs.
        pool = None if other is None else other.pool()
        with torch.cuda.device(device):
            before = torch.cuda.current_stream()
            try:
                # ``thread_local``, because other threads may use the GPU during the
                # recording.
                with torch.cuda.graph(
                    graph, pool=pool, stream=stream, capture_error_mode="thread_local"
                ):
                    found = call()
            finally:
                torch.cuda.set_stream(before)  # torch skips this if the capture fails
        last = weakref.ref(graph)

        def replay() -> Tensor:
            graph.replay()
            return found

        return replay

    return record


class StepGraphs:
    """Computes steps of single rows with CUDA graphs, if the stage can be recorded."""

    def __init__(
        self, function: Callable[..., Tensor], cache: PagedKvCache, record: Record
    ) -> None:
        self._function, self._cache = function, cache
        self._record: Record | None = record
        self._steps: dict[tuple[int, int], _PaddedStep] = {}
        self._count = cache.count

    def clear(self) -> bool:
        """Free the memory of all graphs; return whether there were any."""
        had_any = bool(self._steps)
        self._steps.clear()
        return had_any

    def compute(self, sequences: Sequence[Rows], rows: Tensor) -> Tensor | None:
        """Return the outputs of all rows; None if graphs cannot compute the step."""
        # ``rows``: token ids, [rows], or hidden states, [rows, hidden], on the host.
        if self._record is None or any(each.count != 1 for each in sequences):
            return None
        cache, longest = self._cache, max(each.begin for each in sequences)
        needed = longest // cache.page_size + 1
        shape = _power(len(sequences)), _power(max(needed, MIN_PAGES))
        if shape[0] * shape[1] * cache.page_size > MAX_TOKENS:
            return None
        cache.make_room(sequences)
        if cache.count != self._count:
            # The cache has grown, so its memory has moved, and the graphs are invalid.
            self._count = cache.count
            self.clear()
        inputs = _inputs(cache, sequences, rows, *shape)
        step = self._steps.get(shape)
        if step is None:
            step = _PaddedStep(self._function, cache, inputs)
            found = step.compute()
            # Keep the step only now that it was computed without an error.
            self._steps[shape] = step
        elif step.replay is None:
            padding = _inputs(cache, (), rows[:0], *shape)
            found = self._recorded(step, inputs, padding, len(rows))
        else:
            step.fill(inputs)
            found = step.replay()
        return found[: len(rows)]

    def _recorded(
        self, step: _PaddedStep, inputs: _Inputs, padding: _Inputs, rows: int
    ) -> Tensor:
        """Record a step as a graph; return the outputs computed without the graph.
        Discard the graph if its outputs differ."""
        assert self._record is not None
        replay: Call | None = None
        why = ""
        # Record a step of padding rows only. If the host makes decisions that depend on
        # the rows, the graph repeats those made for padding. Its results for ``inputs``
        # are then wrong, and the graph is discarded.
        step.fill(padding)
        try:
            replay = self._record(step.compute)
        except torch.OutOfMemoryError:
            pass  # there is no memory for a graph now; a later step tries again
        except Exception as error:
            why = repr(error.__context__ or error)
        step.fill(inputs)
        if replay is None:
            self._give_up(why)
            return step.compute()
        found = replay()[:rows].clone()
        expected = step.compute()
        # Compare bits, because NaN is not equal to itself.
        if torch.equal(*(each.view(torch.uint8) for each in (found, expected[:rows]))):
            step.replay = replay
        else:
            self._give_up("the results of a graph differ")
        return expected

    def _give_up(self, why: str) -> None:
        """Free all graphs; record no more, unless only memory was missing."""
        self.clear()
        if why:
            logger.warning("CUDA graphs are not used, so steps are slower: %s", why)
            self._record = None


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Inputs of a padded step, on the host or on the device."""

    # Token, position, slot and pages of each row, [rows, 3 + pages], int64.
    numbers: Tensor
    hidden: Tensor | None  # [rows, hidden]; None in the first stage


class _PaddedStep:
    """Steps of one padded shape, and their inputs on the device."""

    def __init__(
        self, function: Callable[..., Tensor], cache: PagedKvCache, inputs: _Inputs
    ) -> None:
        self._function, self._cache = function, cache
        # These tensors are copied, because an upload on a CPU returns the tensor
        # itself.
        upload, hidden = cache.transfers.upload, inputs.hidden
        self._inputs = _Inputs(
            upload(inputs.numbers.clone()),
            None if hidden is None else upload(hidden.clone()),
        )
        self.replay: Call | None = None

    def fill(self, inputs: _Inputs) -> None:
        own, upload = self._inputs, self._cache.transfers.upload
        own.numbers.copy_(upload(inputs.numbers))
        if (own.hidden is None) != (inputs.hidden is None):
            raise ValueError(
                "rows are token ids in some steps and hidden states in others"
            )
        if own.hidden is not None and inputs.hidden is not None:
            if own.hidden.dtype is not inputs.hidden.dtype:
                raise ValueError("the dtype of hidden states differs between steps")
            own.hidden.copy_(upload(inputs.hidden))

    def compute(self) -> Tensor:
        numbers, hidden = self._inputs.numbers, self._inputs.hidden
        tokens, positions, slots = numbers[:, :3].unbind(1)
        table = numbers[:, 3:].to(torch.int32)
        attention = SingleRowsAttention(self._cache, slots, positions + 1, table)
        rows = tokens if hidden is None else hidden
        wanted = torch.arange(len(rows), device=rows.device)
        return self._function(rows, positions, attention, wanted)


def _inputs(
    cache: PagedKvCache, sequences: Sequence[Rows], rows: Tensor, count: int, pages: int
) -> _Inputs:
    """Return the inputs of a step, padded to ``count`` rows of ``pages`` pages."""
    tokens = rows.tolist() if rows.dim() == 1 else [0] * len(rows)
    numbers = []
    for token, each in zip(tokens, sequences, strict=True):
        own = cache.pages(each.sequence)[:pages]
        [slot] = cache.slots(each.sequence, each.begin, each.begin + 1)
        numbers.append([token, each.begin, slot, *own, *[ZERO] * (pages - len(own))])
    padding = [0, 0, SCRATCH * cache.page_size, *[ZERO] * pages]
    hidden = None
    if rows.dim() > 1:
        hidden = functional.pad(rows, (0, 0, 0, count - len(rows)))
    numbers += [padding] * (count - len(numbers))
    return _Inputs(torch.tensor(numbers), hidden)


def _power(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
