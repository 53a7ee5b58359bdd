"""Attention that gives each row the same bits, whatever it is computed with. Shell.

torch's kernel for CPUs goes over the keys in pieces of 512, from the first key on.
Every call here has a number of rows, and of keys in its last piece, with which this
machine was found to compute alike; keys that a row must not see count as nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from multiworld.serve.generation.alike import OUTPUTS, cover
from multiworld.serve.generation.fingerprint import known
from multiworld.serve.generation.kv_cache import KvCache, Rows

PIECE = 512
"""Keys that torch's kernel takes at once (kvSplitSize in FlashAttentionKernel.cpp)."""

KEYS = (64, 128, 192, 256, 320, 384, 448, PIECE)
"""Numbers of keys in the last piece that are tried."""

ROWS = (4, 16, 64, 256)
"""Numbers of rows that are tried."""

REFERENCE = 16
"""Number of rows with which the others are compared."""


Sizes = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of rows, and of keys in the last piece, both ascending."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Return torch's attention.

    Args:
        query: Shape [batch, heads, rows, size].
        key: Shape [batch, heads, keys, size].
        value: Like ``key``.
        mask: True for the keys that a row sees, [rows, keys].
        scale: Factor of the scores.
    """
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale
    )


@functools.cache
def alike_sizes(
    heads: int, size: int, value_size: int, dtype: torch.dtype, threads: int
) -> Sizes:
    """Return numbers of rows and of keys with which attention gives the same bits.

    Args:
        heads: Number of key heads.
        size: Size of a query and a key.
        value_size: Size of a value.
        dtype: Their dtype.
        threads: Threads of torch; another number may have other sizes.
    """
    what = f"attention of {heads} heads of {size} and {value_size}, {dtype}"
    trial = functools.partial(_Trial, heads, size, value_size, dtype)
    keys = known(f"{what}: keys of {KEYS}", threads, lambda: trial().keys())
    rows = known(
        f"{what}: rows of {ROWS} with {keys}", threads, lambda: trial().rows(keys)
    )
    return tuple(rows), tuple(keys)


class _Trial:
    """Attention on random numbers, in calls of several sizes.

    Args:
        heads: Number of key heads.
        size: Size of a query and a key.
        value_size: Size of a value.
        dtype: Their dtype.
    """

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

    def keys(self) -> list[int]:
        """Return the numbers of keys that give the bits of a whole piece."""
        return [
            keys
            for keys in KEYS
            if self._is_alike(REFERENCE, keys, self._positions(keys))
        ]

    def rows(self, keys: Sequence[int]) -> list[int]:
        """Return the numbers of rows that do so with each of some numbers of keys."""
        return [
            rows
            for rows in ROWS
            if all(self._is_alike(rows, most, self._positions(most)) for most in keys)
        ] or [REFERENCE]

    def _positions(self, keys: int) -> Tensor:
        return torch.randint(0, keys, (max(ROWS),), generator=self._chance)

    def _is_alike(self, rows: int, keys: int, at: Tensor) -> bool:
        wanted = self._computed(REFERENCE, PIECE, at)
        return torch.equal(self._computed(rows, keys, at), wanted)

    def _computed(self, rows: int, keys: int, at: Tensor) -> Tensor:
        """Return the attention of all queries, in calls of some rows and keys."""
        masks = torch.split(torch.arange(keys)[None] <= at[:, None], rows)
        seen_keys = self._key[:, :, :keys].expand(self._batch, -1, -1, -1)
        seen_values = self._value[:, :, :keys].expand(self._batch, -1, -1, -1)
        queries = torch.split(self._query, rows, 2)
        with torch.inference_mode():
            parts = [
                attend(query, seen_keys, seen_values, mask, 1.0)
                for query, mask in zip(queries, masks, strict=True)
            ]
        return torch.cat(parts, 2)


class FixedAttention:
    """Attention of one step, sequence after sequence, in fixed sizes.

    Args:
        cache: Keys and values of the stage.
        rows: The rows of the step, in order.
    """

    def __init__(self, cache: KvCache, rows: Sequence[Rows]) -> None:
        self._cache, self._rows = cache, rows
        self._masks: dict[object, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Keep the keys and values, and attend.

        Args:
            layer: As for ``kv_cache.Attention.attend``, and so are the others.
            query: Queries.
            key: Keys.
            value: Values.
            scale: Factor of the scores.
            window: Most tokens that a row sees.
            softcap: Not supported here.

        Raises:
            ValueError: The scores are to be capped.
        """
        if softcap is not None:
            raise ValueError("deterministic: true does not support capped scores")
        heads, size = key.shape[0], query.shape[2]
        group = query.shape[0] // heads
        factor = size**-0.5 if scale is None else scale
        threads = torch.get_num_threads()
        sizes = alike_sizes(heads, size, value.shape[2], key.dtype, threads)
        self._cache.granule = largest_step(sizes[1])
        found = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
        offset = 0
        for rows in self._rows:
            here = slice(offset, offset + rows.count)
            memory = self._cache.append(
                rows,
                layer,
                key[:, here],
                value[:, here],
                room=padded(sizes[1], rows.begin + rows.count),
            )
            # The rows of a group of heads see the same keys: they are rows of one head.
            queries = query[:, here].reshape(heads, group * rows.count, size)
            out = self._in_tiles(queries, memory, rows, sizes[0], window, factor)
            out = out.reshape(heads * group, rows.count, -1)
            found[here] = out.transpose(0, 1)
            offset += rows.count
        return found

    def _in_tiles(
        self,
        queries: Tensor,
        memory: tuple[Tensor, Tensor],
        rows: Rows,
        sizes: Sequence[int],
        window: int | None,
        scale: float,
    ) -> Tensor:
        """Return the outputs of one sequence, [key heads, group x rows, size]."""
        group = queries.shape[1] // rows.count
        tiles = cover(sizes, queries.shape[1])
        lacking = sum(tiles) - queries.shape[1]
        if lacking:
            queries = functional.pad(queries, (0, 0, 0, lacking))
        mask = self._mask(rows, group, sum(tiles), memory[0].shape[1], window)
        keys, values = (each[None] for each in memory)
        parts, begin = [], 0
        for tile in tiles:
            here = slice(begin, begin + tile)
            parts.append(
                attend(queries[None, :, here], keys, values, mask[here], scale)[0]
            )
            begin += tile
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out[:, : out.shape[1] - lacking]

    def _mask(
        self, rows: Rows, group: int, count: int, length: int, window: int | None
    ) -> Tensor:
        """Return which keys each row of all tiles sees, [rows, keys]."""
        form = (rows, group, count, length, window)
        mask = self._masks.get(form)
        if mask is None:
            at = torch.arange(rows.begin, rows.begin + rows.count).repeat(group)
            at = functional.pad(at, (0, count - len(at)), value=rows.begin)[:, None]
            of = torch.arange(length)[None]
            mask = of <= at
            if window is not None:
                mask &= of > at - window
            self._masks[form] = mask
        return mask


def largest_step(keys: Sequence[int]) -> int:
    """Return by how many keys ``padded`` rounds up at most, and one.

    Args:
        keys: As for ``padded``.
    """
    return max(after - before for before, after in pairwise((0, *keys)))


def padded(keys: Sequence[int], end: int) -> int:
    """Return the number of keys of a call that is to see some keys.

    Args:
        keys: Numbers of keys that the last piece may have, ascending.
        end: Number of keys to see.
    """
    pieces, rest = divmod(end, PIECE)
    return pieces * PIECE + (next(k for k in keys if k >= rest) if rest else 0)
