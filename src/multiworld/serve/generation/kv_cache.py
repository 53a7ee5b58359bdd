"""Keys and values that a stage keeps for its sequences, and attention over them. Shell.

On CPUs the tokens of a sequence lie side by side, and their memory grows by blocks: a
table of blocks in between would have to be gathered for every step, which costs as much
as the attention itself. A kernel that reads blocks where they lie (on a GPU) is another
``Attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

GROWTH = 1.25
"""Factor by which the memory of a sequence grows: each growth copies what is there."""


LEAST_ROWS = 4
"""Rows from which products have fast kernels (bfloat16 on an EPYC, 300 keys: 292 us
with one row, 46 with four)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step that are of one sequence.

    Attributes:
        sequence: The sequence.
        begin: Position of its first row in the sequence.
        count: Number of its rows.
    """

    sequence: Hashable
    begin: int
    count: int


class Attention(Protocol):
    """Attention of the rows of one step over all earlier tokens of their sequences."""

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
        """Keep the keys and values of the rows, and return what the rows attend to.

        Args:
            layer: Number of the layer.
            query: Shape [heads, rows, size].
            key: Shape [key heads, rows, size]; heads are a multiple of key heads.
            value: Like ``key``; its size may differ.
            scale: Factor of the scores; None: 1 / sqrt(size).
            window: Most tokens that a row sees, with itself; None: all before it.
            softcap: Scores are ``softcap * tanh(score / softcap)``; None: as they are.

        Returns:
            Shape [rows, heads, size of the values].
        """


class MissingTokensError(Exception):
    """Tokens before those of a step were never computed here."""


class _Sequence:
    """Keys and values of one sequence, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0


class KvCache:
    """Keys and values of the sequences of one stage.

    Args:
        block_size: Tokens by which memory grows at least.
        attention: Makes the attention of a step, from this cache and its rows.
        granule: See below.

    Attributes:
        granule: Tokens in multiples of which the attention needs memory.
    """

    def __init__(
        self,
        block_size: int = 16,
        attention: Callable[[KvCache, Sequence[Rows]], Attention] | None = None,
        granule: int = 1,
    ) -> None:
        self._block_size, self.granule = block_size, granule
        self._attention = attention or StepAttention
        self._sequences: dict[Hashable, _Sequence] = {}

    def free(self, sequence: Hashable) -> None:
        """Forget a sequence, if it is known."""
        self._sequences.pop(sequence, None)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the keys and values take."""
        return sum(
            tensor.nbytes
            for sequence in self._sequences.values()
            for pair in sequence.layers.values()
            for tensor in pair
        )

    def step(self, rows: Sequence[Rows]) -> Attention:
        """Return the attention of one step; rows from position 0 begin anew.

        Args:
            rows: Its rows, in order.

        Raises:
            MissingTokensError: A sequence has fewer tokens here than the step assumes.
        """
        for each in rows:
            if each.begin == 0:
                self._sequences[each.sequence] = _Sequence()
            found = self._sequences.get(each.sequence)
            if found is None or found.length < each.begin:
                raise MissingTokensError(f"tokens before {each.begin} are missing")
        for each in rows:
            self._sequences[each.sequence].length = each.begin + each.count
        return self._attention(self, rows)

    def append(
        self, rows: Rows, layer: int, key: Tensor, value: Tensor, room: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keep keys and values; return all of the sequence up to them, or with room.

        Args:
            rows: Whose they are.
            layer: Number of the layer.
            key: Shape [key heads, rows, size].
            value: Like ``key``.
            room: Least tokens to return; those after the end are numbers of any kind,
                but no NaN.
        """
        layers = self._sequences[rows.sequence].layers
        end = rows.begin + rows.count
        found = layers.get(layer)
        least = max(end, room)
        if found is None or found[0].shape[1] < least:
            size = max(least, int(GROWTH * (found[0].shape[1] if found else 0)))
            size = -(-size // self._block_size) * self._block_size
            make = torch.zeros if room else torch.empty
            grown = tuple(
                make(
                    new.shape[0], size, new.shape[2], dtype=new.dtype, device=new.device
                )
                for new in (key, value)
            )
            if found is not None:
                for old, new in zip(found, grown, strict=True):
                    new[:, : rows.begin] = old[:, : rows.begin]
            layers[layer] = found = grown[0], grown[1]
        keys, values = found
        keys[:, rows.begin : end] = key
        values[:, rows.begin : end] = value
        return keys[:, :least], values[:, :least]

    def copied(
        self, sequence: Hashable, begin: int, end: int
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """Return a copy of keys and values of a sequence, by layer.

        Args:
            sequence: The sequence.
            begin: Position of the first token.
            end: Position after the last token.
        """
        return {
            layer: (keys[:, begin:end].clone(), values[:, begin:end].clone())
            for layer, (keys, values) in self._sequences[sequence].layers.items()
        }

    def restore(
        self,
        sequence: Hashable,
        pieces: Sequence[dict[int, tuple[Tensor, Tensor]]],
        tokens: int,
    ) -> None:
        """Let a sequence begin with keys and values that were computed before.

        Args:
            sequence: The sequence.
            pieces: Keys and values of its first tokens, by layer, piece by piece.
            tokens: Number of those tokens.
        """
        made = self._sequences[sequence] = _Sequence()
        made.length = tokens
        for layer in pieces[0]:
            keys = torch.cat([piece[layer][0] for piece in pieces], 1)
            values = torch.cat([piece[layer][1] for piece in pieces], 1)
            made.layers[layer] = keys, values


class StepAttention:
    """Attention of one step by torch, one sequence after the other.

    Args:
        cache: Keys and values of the stage.
        rows: The rows of the step, in order.
    """

    def __init__(self, cache: KvCache, rows: Sequence[Rows]) -> None:
        self._cache, self._rows = cache, rows
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

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
            layer: As for ``Attention.attend``, and so are the others.
            query: Queries.
            key: Keys.
            value: Values.
            scale: Factor of the scores.
            window: Most tokens that a row sees.
            softcap: Bound of the scores.
        """
        found = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
        offset = 0
        for rows in self._rows:
            here = slice(offset, offset + rows.count)
            keys, values = self._cache.append(rows, layer, key[:, here], value[:, here])
            first = 0 if window is None else max(0, rows.begin - window + 1)
            mask = self._mask(rows, first, window)
            seen = keys[:, first:], values[:, first:]
            if softcap is None and rows.count == 1:
                out = _of_one_row(query[:, here], *seen, scale)
            elif softcap is None:
                out = functional.scaled_dot_product_attention(
                    query[None, :, here],
                    seen[0][None],
                    seen[1][None],
                    attn_mask=mask,
                    scale=scale,
                    enable_gqa=query.shape[0] != key.shape[0],
                )[0]
            else:
                out = _capped(query[:, here], *seen, mask, scale, softcap)
            found[here] = out.transpose(0, 1)
            offset += rows.count
        return found

    def _mask(self, rows: Rows, first: int, window: int | None) -> Tensor | None:
        """Return which keys each row sees, [rows, keys]; None: all of them."""
        if rows.count == 1:
            return None
        end = rows.begin + rows.count
        mask = self._masks.get((rows.begin, rows.count, window))
        if mask is None:
            at = torch.arange(rows.begin, end)[:, None]
            of = torch.arange(first, end)[None]
            mask = of <= at
            if window is not None:
                mask &= of > at - window
            self._masks[rows.begin, rows.count, window] = mask
        return mask


def _of_one_row(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor:
    """Return the attention of one row to all keys, [heads, 1, size].

    Heads that share keys are rows of one head. A product with a single row is several
    times slower in bfloat16.
    """
    heads = len(key)
    group = len(query) // heads
    rows = query.reshape(heads, group, -1)
    if group == 1:
        rows = functional.pad(rows, (0, 0, 0, LEAST_ROWS - 1))
    out = functional.scaled_dot_product_attention(
        rows[None], key[None], value[None], scale=scale
    )[0, :, :group]
    return out.reshape(len(query), 1, -1)


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Return attention whose scores are capped, as in Gemma 2, [heads, rows, size]."""
    repeats = query.shape[0] // key.shape[0]
    key, value = (each.repeat_interleave(repeats, 0) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = softcap * torch.tanh(query @ key.transpose(1, 2) * scale / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
