"""Batch-invariant attention: a row has the same bits in a batch of any shape.

torch's CPU kernel processes the keys in pieces of 512, from the first key on. A test on
this machine finds the row counts, and the key counts of the last piece, that give
bit-identical results. This module calls the kernel only with these. A mask hides the
keys that a row must not attend to.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.nn import functional

from multiworld.serve.engine.compute.batch_invariant_layers import OUTPUTS, cover
from multiworld.serve.engine.compute.hardware_fingerprint import known
from multiworld.serve.engine.compute.kv_cache import (
    Batch,
    KvCache,
    Rows,
    additive_mask,
)
from multiworld.serve.engine.compute.kv_memory import SLOTS
from multiworld.serve.engine.models.attention import Attention, AttentionCall

# Keys per iteration of torch's kernel (kvSplitSize in FlashAttentionKernel.cpp).
PIECE = 512
# Candidate numbers of keys in the last piece of a sequence.
KEYS = (64, 128, 192, 256, 320, 384, 448, PIECE)
# Candidate numbers of rows in a call. On some processors, MKL's kernels take 6 rows at
# a time and round the remaining rows differently: there, 12 and 24 rows work, 16 do
# not.
ROWS = (4, 12, 16, 24, 64, 256)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Call sizes that give bit-identical results."""

    rows: tuple[int, ...]
    keys: tuple[int, ...]  # numbers of keys in the last piece
    sequences: int


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Return torch's attention; ``mask``: a bias, or True for keys to attend to."""
    # Queries: [batch, heads, rows, size]; keys, values: [batch, heads, keys, size].
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )


@functools.cache
def invariant_sizes(
    heads: int, size: int, value_size: int, dtype: torch.dtype, threads: int
) -> Sizes:
    """Return the sizes of calls with bit-identical results for ``heads`` key heads."""
    what = f"attention of {heads} heads of {size} and {value_size}, {dtype}"
    trial = functools.partial(_Trial, heads, size, value_size, dtype)
    keys = known(f"{what}: keys of {KEYS}", threads, lambda: trial().keys())
    rows = known(
        f"{what}: rows of {ROWS} with {keys}", threads, lambda: trial().rows(keys)
    )
    sequences = known(
        f"{what}: texts up to {SLOTS} with {keys} and {rows}",
        threads,
        lambda: trial().sequences(rows, keys),
    )
    return Sizes(tuple(rows), tuple(keys), max(sequences))


class _Trial:
    """Attention on random numbers, in calls of several sizes."""

    def __init__(
        self, heads: int, size: int, value_size: int, dtype: torch.dtype
    ) -> None:
        self._chance = torch.Generator().manual_seed(0)
        self._batch = max(1, -(-OUTPUTS // (heads * max(ROWS) * value_size)))
        self._query = self._drawn(dtype, self._batch, heads, max(ROWS), size)
        self._key = self._drawn(dtype, 1, heads, PIECE, size)
        self._value = self._drawn(dtype, 1, heads, PIECE, value_size)

    def _drawn(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._chance).to(dtype)

    @functools.cached_property
    def _reference(self) -> int:
        """Row count of the reference calls."""
        # The first count for which the bits of a row do not depend on its position.
        at = self._positions(PIECE)
        found = (
            rows for rows in ROWS if self._is_position_independent(rows, PIECE, at)
        )
        return next(found, ROWS[0])

    def keys(self) -> list[int]:
        """Return the key counts that give the same bits as a whole piece."""
        return [
            keys
            for keys in KEYS
            if self._is_invariant(self._reference, keys, self._positions(keys))
        ] or [PIECE]

    def rows(self, keys: Sequence[int]) -> list[int]:
        """Return the row counts that give the same bits with each of ``keys``."""
        return [
            rows
            for rows in ROWS
            if all(
                self._is_invariant(rows, count, self._positions(count))
                for count in keys
            )
        ] or [self._reference]

    def sequences(self, rows: Sequence[int], keys: Sequence[int]) -> list[int]:
        """Return the sequence counts that give the same bits as single sequences."""
        extremes = list(product({rows[0], rows[-1]}, {keys[0], keys[-1]}))
        found = [1]
        for count in range(2, SLOTS + 1):
            if not all(self._are_same(count, *sizes) for sizes in extremes):
                break
            found.append(count)
        return found

    def _are_same(self, count: int, rows: int, keys: int) -> bool:
        heads, size, values = (*self._key.shape[1::2], self._value.shape[3])
        dtype = self._key.dtype
        key = self._drawn(dtype, count, heads, 2 * keys, size)[:, :, :keys]
        value = self._drawn(dtype, count, heads, 2 * keys, values)[:, :, :keys]
        for _ in range(-(-OUTPUTS // (SLOTS * count * heads * rows * values))):
            query = self._drawn(dtype, count, heads, rows, size)
            at = torch.randint(0, keys, (count, 1, rows, 1), generator=self._chance)
            mask = torch.arange(keys) <= at
            with torch.inference_mode():
                together = attend(query, key, value, mask, 1.0)
                alone = [
                    attend(query[here], key[here], value[here], mask[here], 1.0)
                    for here in (slice(n, n + 1) for n in range(count))
                ]
            if not torch.equal(together, torch.cat(alone)):
                return False
        return True

    def _positions(self, keys: int) -> Tensor:
        return torch.randint(0, keys, (max(ROWS),), generator=self._chance)

    def _is_invariant(self, rows: int, keys: int, at: Tensor) -> bool:
        wanted = self._computed(self._reference, PIECE, at)
        found = self._computed(rows, keys, at)
        return torch.equal(found, wanted) and self._is_position_independent(
            rows, keys, at
        )

    def _is_position_independent(self, rows: int, keys: int, at: Tensor) -> bool:
        """Return whether a row has the same bits at the next position in a call."""
        found = self._computed(rows, keys, at)
        return torch.equal(self._computed(rows, keys, at, shift=1), found)

    def _computed(self, rows: int, keys: int, at: Tensor, shift: int = 0) -> Tensor:
        """Return the attention of all queries, in calls of the given size."""
        # ``shift`` moves each query this many rows towards the end of its call, to test
        # whether a row's position changes its bits.
        allowed = torch.arange(keys)[None] <= at.roll(shift)[:, None]
        masks = torch.split(allowed, rows)
        seen_keys = self._key[:, :, :keys].expand(self._batch, -1, -1, -1)
        seen_values = self._value[:, :, :keys].expand(self._batch, -1, -1, -1)
        queries = torch.split(self._query.roll(shift, 2), rows, 2)
        with torch.inference_mode():
            parts = [
                attend(query, seen_keys, seen_values, mask, 1.0)
                for query, mask in zip(queries, masks, strict=True)
            ]
        return torch.cat(parts, 2).roll(-shift, 2)


class InvariantAttention(Attention):
    """Batch-invariant attention of one step, batched for sequences with one row."""

    def __init__(self, cache: KvCache, rows: Sequence[Rows]) -> None:
        self._cache, self._rows = cache, rows
        self._agreed: tuple[tuple[int, ...], int] | None = None
        self._batches: list[Batch] = []
        self._others: list[tuple[int, Rows, Tensor]] = []
        self._masks: dict[object, Tensor] = {}

    def compute(self, call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        if call.softcap is not None:
            raise ValueError(
                "deterministic: true does not support softcapped attention logits"
            )
        heads, size = key.shape[0], query.shape[2]
        threads = torch.get_num_threads()
        sizes = invariant_sizes(heads, size, value.shape[2], key.dtype, threads)
        max_count = sizes.sequences if len(query) // heads <= sizes.rows[0] else 1
        agreed = self._cache.agree(sizes.keys, max_count)
        room = functools.partial(padded, agreed[0])
        if self._agreed != agreed:  # in the first layer of all steps but the first
            self._agreed = agreed
            self._masks.clear()
            self._cache.granule = largest_step(agreed[0])
            self._batches, others = self._cache.batches(self._rows, room, agreed[1])
            self._others = [(n, r, torch.tensor([r.begin])) for n, r in others]
        tiled = functools.partial(
            self._in_tiles, sizes=sizes.rows, window=call.window, scale=call.factor
        )
        found = call.empty()
        for batch in self._batches:
            memory = self._cache.append_batch(batch, call.layer, key, value)
            length = room(int(batch.at[0]) + 1)
            keys, values = (each[:, :, :length] for each in memory)
            queries = query.index_select(1, batch.rows).transpose(0, 1)
            out = tiled(queries[:, :, None], keys, values, batch.at)
            found.index_copy_(0, batch.rows, out[:, :, 0])
        for offset, rows, begins in self._others:
            here = slice(offset, offset + rows.count)
            length = room(rows.begin + rows.count)
            keys, values = self._cache.append(
                rows, call.layer, key[:, here], value[:, here], room=length
            )
            out = tiled(query[None, :, here], keys[None], values[None], begins)
            found[here] = out[0].transpose(0, 1)
        return found

    def _in_tiles(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        begins: Tensor,
        *,
        sizes: Sequence[int],
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Return the attention of sequences, [sequences, heads, rows, size]."""
        sequences, heads, count, _ = query.shape
        # Query heads that share keys become rows of one head.
        group = heads // key.shape[1]
        queries = query.reshape(sequences, key.shape[1], group * count, -1)
        tiles = cover(sizes, group * count)
        lacking = sum(tiles) - group * count
        if lacking:
            queries = functional.pad(queries, (0, 0, 0, lacking))
        mask = self._mask(
            begins, count, group, sum(tiles), key.shape[2], window, query.dtype
        )
        parts, begin = [], 0
        for tile in tiles:
            here = slice(begin, begin + tile)
            parts.append(
                attend(queries[:, :, here], key, value, mask[:, :, here], scale)
            )
            begin += tile
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return out[:, :, : group * count].reshape(sequences, heads, count, -1)

    def _mask(
        self,
        begins: Tensor,
        count: int,
        group: int,
        rows: int,
        length: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the additive mask (0 or -inf), [sequences, 1, rows, keys]."""
        # An id is a safe key, because ``begins`` live as long as the masks. The mask is
        # additive, because torch would convert a Boolean one anew in every layer.
        form = (id(begins), group, window, rows)
        mask = self._masks.get(form)
        if mask is None:
            at = torch.arange(count).repeat(group)
            at = functional.pad(at, (0, rows - len(at))) + begins[:, None]
            mask = additive_mask(at[..., None], torch.arange(length), window, dtype)
            mask = self._masks[form] = mask[:, None]
        return mask


def largest_step(keys: Sequence[int]) -> int:
    """Return the maximum number of keys that ``padded`` adds, plus one."""
    return max(after - before for before, after in pairwise((0, *keys)))


def padded(keys: Sequence[int], end: int) -> int:
    """Return the number of keys of a call that covers ``end`` keys."""
    pieces, rest = divmod(end, PIECE)
    return pieces * PIECE + (next(k for k in keys if k >= rest) if rest else 0)
