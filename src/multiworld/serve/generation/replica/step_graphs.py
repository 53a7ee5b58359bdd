"""CUDA graphs of steps in which each sequence has one row.

Launching the kernels of such a step one by one takes the host several times as long as
they run. A graph launches all of them at once. It computes a fixed number of rows over
fixed numbers of pages, from tensors that stay where they are: so a step is filled up
with rows of no sequence, and its tables with pages of zeros.

A size is computed without a graph when it comes first, which also initialises
libraries. When it comes again it is recorded, and the graph's results are compared once
with those of the computation that it replaces.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multiworld.serve.generation.replica.kv_cache import Rows
from multiworld.serve.generation.replica.paged_kv_cache import (
    SPARE,
    ZERO,
    PagedKvCache,
    SingleRowsAttention,
)

logger = logging.getLogger("multiworld.serve")

Call = Callable[[], Tensor]
# Records the kernels that a call launches; returns a call that launches them again and
# returns the same tensor.
Record = Callable[[Call], Call]

# Pages of a sequence at least, so that all short ones need one graph.
MIN_PAGES = 16
# Tokens that a graph attends to, with those that fill up. Beyond, the GPU computes for
# about as long as the host launches, and gathered pages take much memory.
MAX_TOKENS = 1 << 15


def recorder(device: torch.device) -> Record:
    """Return the recorder of a GPU. Its graphs share memory: none runs beside another,
    and what one returns is used before the next one runs."""
    last: weakref.ref[torch.cuda.CUDAGraph] | None = None

    def record(call: Call) -> Call:
        nonlocal last
        graph, other = torch.cuda.CUDAGraph(), None if last is None else last()
        pool = None if other is None else other.pool()  # which dies with its graphs
        # Other threads may use the GPU meanwhile.
        recording = torch.cuda.graph(
            graph, pool=pool, capture_error_mode="thread_local"
        )
        with torch.cuda.device(device), recording:
            found = call()
        last = weakref.ref(graph)

        def replay() -> Tensor:
            graph.replay()
            return found

        return replay

    return record


class StepGraphs:
    """Computes steps of single rows by graphs, where a stage can be recorded."""

    def __init__(
        self, function: Callable[..., Tensor], cache: PagedKvCache, record: Record
    ) -> None:
        self._function, self._cache = function, cache
        self._record: Record | None = record
        self._sizes: dict[tuple[int, int], _Size] = {}
        self._count = cache.count

    def clear(self) -> None:
        """Free the memory of all graphs."""
        self._sizes.clear()

    def compute(self, sequences: Sequence[Rows], rows: Tensor) -> Tensor | None:
        """Return the outputs of all rows; None if a graph is not for such a step."""
        # ``rows``: token ids, [rows], or hidden states, [rows, hidden], on the host.
        if self._record is None or any(each.count != 1 for each in sequences):
            return None
        cache, longest = self._cache, max(each.begin for each in sequences)
        needed = longest // cache.page_size + 1
        count, pages = _power(len(sequences)), _power(max(needed, MIN_PAGES))
        if count * pages * cache.page_size > MAX_TOKENS:
            return None
        cache.make_room(sequences)
        if cache.count != self._count:  # the pages are elsewhere
            self._count = cache.count
            self.clear()
        size = self._sizes.get((count, pages))
        is_new = size is None
        if size is None:
            size = self._sizes[count, pages] = _Size(self._function, cache)
        size.fill(_numbers(cache, sequences, rows, count, pages), _hidden(rows, count))
        found = size.compute() if is_new else self._recorded(size, len(rows))
        return found[: len(rows)]

    def _recorded(self, size: _Size, rows: int) -> Tensor:
        assert self._record is not None
        if size.replay is not None:
            return size.replay()
        try:
            size.replay = self._record(size.compute)
            found = size.replay()[:rows].clone()
        except Exception as error:
            return self._without_graphs(size, repr(error))
        expected = size.compute()
        if torch.equal(found, expected[:rows]):
            return expected
        return self._without_graphs(size, "results differ")

    def _without_graphs(self, size: _Size, why: str) -> Tensor:
        logger.warning(
            "steps are computed without CUDA graphs, which is slower: %s", why
        )
        self._record = None
        self.clear()
        return size.compute()


class _Size:
    """Steps of one number of rows and pages, and their inputs on the device."""

    def __init__(self, function: Callable[..., Tensor], cache: PagedKvCache) -> None:
        self._function, self._cache = function, cache
        self._numbers: Tensor | None = None
        self._hidden: Tensor | None = None
        self.replay: Call | None = None

    def fill(self, numbers: Tensor, hidden: Tensor | None) -> None:
        upload = self._cache.transfers.upload
        if self._numbers is None:  # those of the host may be used again
            self._numbers = upload(numbers.clone())
            self._hidden = None if hidden is None else upload(hidden.clone())
            return
        self._numbers.copy_(upload(numbers))
        if hidden is not None and self._hidden is not None:
            self._hidden.copy_(upload(hidden))

    def compute(self) -> Tensor:
        assert self._numbers is not None
        tokens, positions, slots = self._numbers[:, :3].unbind(1)
        table = self._numbers[:, 3:].to(torch.int32)
        attention = SingleRowsAttention(self._cache, slots, positions + 1, table)
        rows = tokens if self._hidden is None else self._hidden
        wanted = torch.arange(len(rows), device=rows.device)
        return self._function(rows, positions, attention, wanted)


def _numbers(
    cache: PagedKvCache, sequences: Sequence[Rows], rows: Tensor, count: int, pages: int
) -> Tensor:
    """Return token, position, slot and pages of each row, [count, 3 + pages]."""
    tokens = rows.tolist() if rows.dim() == 1 else [0] * len(rows)
    found = []
    for token, each in zip(tokens, sequences, strict=True):
        own = cache.pages(each.sequence)[:pages]
        [slot] = cache.slots(each.sequence, each.begin, each.begin + 1)
        found.append([token, each.begin, slot, *own, *[ZERO] * (pages - len(own))])
    spare = [0, 0, SPARE * cache.page_size, *[ZERO] * pages]
    return torch.tensor(found + [spare] * (count - len(found)))


def _hidden(rows: Tensor, count: int) -> Tensor | None:
    if rows.dim() == 1:
        return None
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


def _power(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << (number - 1).bit_length()
