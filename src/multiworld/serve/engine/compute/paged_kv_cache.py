"""KV cache in pages, and attention over them, for GPUs.

The keys of a layer are one tensor, [pages, page size, key heads, size], and so are its
values. A sequence has a list of pages; a step uploads the lists of its sequences as a
table. torch's ``varlen_attn`` reads the pages through the table. Where this kernel does
not run (on a CPU, in float32, in a torch whose kernel takes no table), the pages are
gathered, and the attention is computed as in ``kv_cache``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from multiworld.serve.engine.compute.kv_cache import (
    Layers,
    MissingTokensError,
    Rows,
    additive_mask,
    of_capped_rows,
    of_rows,
    of_single_rows,
)
from multiworld.serve.engine.compute.transfers import HOST, Transfers
from multiworld.serve.engine.models.attention import Attention, AttentionCall

logger = logging.getLogger("multiworld.serve")

MIN_PAGES = 64  # minimum number of pages of a layer
# Reserved pages. ``ZERO`` always contains zeros, and pads page tables. ``SCRATCH``
# receives the keys and values of a step's padding rows.
ZERO, SCRATCH = RESERVED = range(2)
Pool = tuple[Tensor, Tensor]  # keys and values of all pages of a layer


@functools.cache
def torch_kernel() -> Callable[..., Tensor] | None:
    """Return torch's attention over pages; None if this torch has none."""
    try:
        # Imported late, because the import loads torch's compiler (1 s, 100 MB).
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch was built without this kernel
        return None
    kernel = cast("Callable[..., Tensor]", varlen_attn)
    takes_pages = "block_table" in inspect.signature(kernel).parameters
    return kernel if takes_pages else None


class PagedKvCache:
    """``KvCache`` in pages; tokens that are not written yet are zero."""

    def __init__(
        self, page_size: int = 16, tokens: int = 0, transfers: Transfers = HOST
    ) -> None:
        self.page_size = self.granule = page_size
        self.transfers = transfers
        # Initial number of pages of a layer. It is doubled whenever the pages are used
        # up.
        needed = len(RESERVED) - (-tokens // page_size)
        self.count = max(MIN_PAGES, needed)  # current number of pages of a layer
        self._free = list(range(len(RESERVED), self.count))
        self._pages: dict[Hashable, list[int]] = {}
        self.lengths: dict[Hashable, int] = {}  # number of tokens of each sequence
        self._pools: dict[int, Pool] = {}
        self._has_kernel: dict[tuple[int, ...], bool] = {}

    @property
    def nbytes(self) -> int:
        used = self.count - len(RESERVED) - len(self._free)
        return sum(
            tensor[0].nbytes * used for pool in self._pools.values() for tensor in pool
        )

    def free(self, sequence: Hashable) -> None:
        self._free += self._pages.pop(sequence, ())
        self.lengths.pop(sequence, None)

    def step(self, rows: Sequence[Rows]) -> Attention:
        self.make_room(rows)
        return PagedAttention(self, rows)

    def make_room(self, rows: Sequence[Rows]) -> None:
        """Allocate pages for the rows of a step; sequences at position 0 start over."""
        for each in rows:
            if each.begin == 0:
                self.free(each.sequence)
            elif self.lengths.get(each.sequence, 0) < each.begin:
                raise MissingTokensError(f"tokens before {each.begin} are missing")
        added: list[int] = []
        try:
            for each in rows:
                added += self._make_room(each.sequence, each.begin + each.count)
                self.lengths[each.sequence] = each.begin + each.count
        finally:  # also if memory runs out: the next step uses the pages as they are
            self._clear(added)

    def _make_room(self, sequence: Hashable, tokens: int) -> list[int]:
        """Allocate pages for ``tokens`` tokens of a sequence; return the new ones."""
        pages = self._pages.setdefault(sequence, [])
        missing = -(-tokens // self.page_size) - len(pages)
        while missing > len(self._free):
            self._grow()
        added = [self._free.pop() for _ in range(missing)]
        pages += added
        return added

    def _clear(self, pages: Sequence[int]) -> None:
        """Zero pages, because earlier sequences may have left NaNs in them."""
        if pages and self._pools:
            places = self.transfers.upload(torch.tensor(pages))
            for pool in self._pools.values():
                for each in pool:
                    each.index_fill_(0, places, 0.0)

    def _grow(self) -> None:
        def doubled(pages: Tensor) -> Tensor:
            return torch.cat([pages, torch.zeros_like(pages)])

        # Replace the pages of all layers at once, or of none, because memory may run
        # out.
        self._pools = {
            layer: (doubled(keys), doubled(values))
            for layer, (keys, values) in self._pools.items()
        }
        self._free += range(self.count, 2 * self.count)
        self.count *= 2

    def pages(self, sequence: Hashable) -> list[int]:
        return self._pages[sequence]

    def slots(self, sequence: Hashable, begin: int, end: int) -> list[int]:
        """Return the slots of tokens: their indices among the tokens of all pages."""
        size, pages = self.page_size, self._pages[sequence]
        return [pages[at // size] * size + at % size for at in range(begin, end)]

    def pool(self, layer: int, like: tuple[Tensor, Tensor]) -> Pool:
        """Return a layer's pages; ``like``: key and value, [key heads, rows, size]."""
        found = self._pools.get(layer)
        if found is None:
            keys, values = (
                torch.zeros(
                    (self.count, self.page_size, each.shape[0], each.shape[2]),
                    dtype=each.dtype,
                    device=each.device,
                )
                for each in like
            )
            found = self._pools[layer] = keys, values
        return found

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> Pool:
        """Write keys and values, [key heads, rows, size], to slots."""
        pool = self.pool(layer, (key, value))
        for pages, new in zip(pool, (key, value), strict=True):
            pages.flatten(0, 1).index_copy_(0, slots, new.transpose(0, 1))
        return pool

    def has_kernel(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        """Return whether torch's kernel takes such tensors; tried once per shape."""
        if not may_have_kernel(query):
            return False
        shape = query.shape[0], *keys.shape[2:], values.shape[3]
        found = self._has_kernel.get(shape)
        if found is None:
            found = self._has_kernel[shape] = self._tried(query, keys, values)
        return found

    def _tried(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        # The kernel needs a recent GPU and, for pages, a recent FlashAttention.
        counts = (torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [1], [[0]]))
        begins, used, table = map(self.transfers.upload, counts)
        one = query.new_zeros(1, query.shape[0], query.shape[2])
        try:
            over_pages(one, keys, values, begins, used, table, 1, 1, None, None)
        except (RuntimeError, ValueError) as error:
            logger.warning(
                "torch's attention over pages does not run here (%s); pages are "
                "gathered, which is slower",
                error,
            )
            return False
        return True

    @torch.inference_mode()
    def copied(self, sequence: Hashable, begin: int, end: int) -> Layers:
        if sequence not in self._pages:
            return {}
        transfers = self.transfers
        places = transfers.upload(torch.tensor(self.slots(sequence, begin, end)))
        found: Layers = {}
        for layer, pool in self._pools.items():
            keys, values = (
                transfers.download(
                    pages.flatten(0, 1).index_select(0, places).transpose(0, 1)
                ).contiguous()
                for pages in pool
            )
            found[layer] = keys, values
        return found

    @torch.inference_mode()
    def restore(
        self, sequence: Hashable, pieces: Sequence[Layers], tokens: int
    ) -> None:
        self.free(sequence)
        self._clear(self._make_room(sequence, tokens))
        self.lengths[sequence] = tokens
        transfers = self.transfers
        slots = transfers.upload(torch.tensor(self.slots(sequence, 0, tokens)))
        for layer in pieces[0]:
            key, value = (
                transfers.upload(
                    torch.cat([piece[layer][number] for piece in pieces], 1)[:, :tokens]
                )
                for number in range(2)
            )
            self.write(layer, slots, key, value)


class PagedAttention(Attention):
    """Attention of one step over pages; its tables are uploaded once."""

    def __init__(self, cache: PagedKvCache, rows: Sequence[Rows]) -> None:
        self._cache, self._rows = cache, rows
        upload = cache.transfers.upload
        ends = [each.begin + each.count for each in rows]
        slots = [
            slot
            for each, end in zip(rows, ends, strict=True)
            for slot in cache.slots(each.sequence, each.begin, end)
        ]
        self._slots = upload(torch.tensor(slots))
        lists = [cache.pages(each.sequence) for each in rows]
        width = max(map(len, lists))
        table = [pages + [ZERO] * (width - len(pages)) for pages in lists]
        self._table = upload(torch.tensor(table, dtype=torch.int32))
        self._ends = upload(torch.tensor(ends, dtype=torch.int32))
        begins = [0, *accumulate(each.count for each in rows)]
        self._begins = upload(torch.tensor(begins, dtype=torch.int32))
        self._max_rows = max(each.count for each in rows)
        self._max_keys = max(ends)
        self._offsets = begins[:-1]
        singles = [n for n, each in enumerate(rows) if each.count == 1]
        self._singles = upload(torch.tensor(singles, dtype=torch.int64))
        self._single_rows = upload(
            torch.tensor([begins[n] for n in singles], dtype=torch.int64)
        )
        self._others = [n for n, each in enumerate(rows) if each.count > 1]
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        # For the sequences with one row, by attention window: their page tables, and
        # the masks of their keys.
        self._singles_by: dict[int | None, tuple[Tensor, Tensor]] = {}

    def compute(self, call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        keys, values = self._cache.write(call.layer, self._slots, key, value)
        if call.softcap is None and self._cache.has_kernel(query, keys, values):
            return over_pages(
                query.transpose(0, 1).contiguous(),
                keys,
                values,
                self._begins,
                self._ends,
                self._table,
                self._max_rows,
                self._max_keys,
                call.scale,
                call.window,
            )
        found = call.empty()
        if len(self._singles) and call.softcap is None:  # all single rows in one call
            rows = query.index_select(1, self._single_rows)
            tables, mask = self._single_tables(call.window, query.dtype)
            out = of_single_pages(rows, (keys, values), tables, mask, call.scale)
            found.index_copy_(0, self._single_rows, out)
        for n in self._others if call.softcap is None else range(len(self._rows)):
            one, begin = self._rows[n], self._offsets[n]
            here, end = slice(begin, begin + one.count), one.begin + one.count
            table = self._table[n : n + 1]
            memory = gather(keys, table)[0, :, :end], gather(values, table)[0, :, :end]
            mask = self._mask(n, call.window)
            out = of_rows(query[:, here], *memory, mask, call.scale, call.softcap)
            found[here] = out.transpose(0, 1)
        return found

    def _single_tables(
        self, window: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        known = self._singles_by.get(window)
        if known is None:
            tables = self._table.index_select(0, self._singles)
            ends = self._ends.index_select(0, self._singles)
            tokens = tables.shape[1] * self._cache.page_size
            known = tables, mask_of_singles(ends, tokens, window, dtype)
            self._singles_by[window] = known
        return known

    def _mask(self, n: int, window: int | None) -> Tensor:
        """Return which keys each row of a sequence attends to, [rows, keys]."""
        mask = self._masks.get((n, window))
        if mask is None:
            rows = self._rows[n]
            end = rows.begin + rows.count
            at, of = torch.arange(rows.begin, end)[:, None], torch.arange(end)[None]
            mask = of <= at
            if window is not None:
                mask &= of > at - window
            mask = self._masks[n, window] = self._cache.transfers.upload(mask)
        return mask


class SingleRowsAttention(Attention):
    """Attention of one row of each sequence, with tables that are on the device."""

    def __init__(
        self,
        cache: PagedKvCache,
        slots: Tensor,  # positions of the rows' tokens in the pool, [rows], int64
        ends: Tensor,  # lengths of the sequences, including their new rows, [rows]
        table: Tensor,  # pages of each sequence, [rows, pages], int32
    ) -> None:
        self._cache, self._slots, self._table = cache, slots, table
        self._ends = ends.to(torch.int32)
        self._begins = torch.arange(
            len(slots) + 1, dtype=torch.int32, device=slots.device
        )
        self._tokens = table.shape[1] * cache.page_size
        self._masks: dict[int | None, Tensor] = {}

    def compute(self, call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        pool = self._cache.write(call.layer, self._slots, key, value)
        if call.softcap is None and self._cache.has_kernel(query, *pool):
            return over_pages(
                query.transpose(0, 1).contiguous(),
                *pool,
                self._begins,
                self._ends,
                self._table,
                1,
                self._tokens,
                call.scale,
                call.window,
            )
        if call.window not in self._masks:
            self._masks[call.window] = mask_of_singles(
                self._ends, self._tokens, call.window, query.dtype
            )
        mask = self._masks[call.window]
        if call.softcap is None:
            return of_single_pages(query, pool, self._table, mask, call.scale)
        keys, values = (gather(pages, self._table) for pages in pool)
        rows = query.transpose(0, 1)[:, :, None]
        return of_capped_rows(rows, keys, values, mask == 0, call.scale, call.softcap)[
            :, :, 0
        ]


def of_single_pages(
    query: Tensor, pool: Pool, tables: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Return the attention of one row of each sequence, [sequences, heads, size]."""
    keys, values = (gather(pages, tables) for pages in pool)
    return of_single_rows(query, keys, values, mask, scale)


def mask_of_singles(
    ends: Tensor, tokens: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the mask of the last token of each sequence, [sequences, 1, 1, tokens]."""
    of = torch.arange(tokens, device=ends.device)
    return additive_mask(ends[:, None] - 1, of, window, dtype)[:, None, None]


def gather(pages: Tensor, tables: Tensor) -> Tensor:
    """Return the tokens of sequences, [sequences, key heads, tokens, size]."""
    # ``pages``: [pages, page size, key heads, size]; ``tables``: [sequences, pages].
    found = pages.index_select(0, tables.flatten())
    return found.view(*tables.shape, *pages.shape[1:]).flatten(1, 2).transpose(1, 2)


def may_have_kernel(query: Tensor) -> bool:
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return is_half and query.device.type == "cuda" and torch_kernel() is not None


def over_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    ends: Tensor,
    table: Tensor,
    max_rows: int,
    max_keys: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Return the attention of rows, [rows, heads, size], by torch's kernel."""
    # Do not split the keys (``num_splits``): the bits of a row would otherwise depend
    # on the lengths of other sequences.
    kernel = torch_kernel()
    assert kernel is not None
    return kernel(
        query,
        keys,
        values,
        begins,
        None,
        max_rows,
        max_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=ends,
        block_table=table,
        num_splits=1,
    )
