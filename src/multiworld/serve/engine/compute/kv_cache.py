"""KV cache of a stage, and attention over it.

On CPUs, the keys and values of a sequence are contiguous, and their memory grows by
blocks. A block table would require a gather in every step, which costs as much as the
attention itself. Sequences of about the same length are adjacent, so that one call can
compute the attention of one row of each. For GPUs, ``paged_kv_cache`` has scattered
pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from multiworld.serve.engine.compute.kv_memory import SLOTS, KvMemory, Run
from multiworld.serve.engine.models.attention import Attention, AttentionCall

# Keys and values by layer, on the host; both are [key heads, tokens, size].
Layers = dict[int, tuple[Tensor, Tensor]]

# Minimum number of rows of a matmul, because kernels for fewer are slow. In bfloat16 on
# an EPYC with 300 keys, one row takes 292 us, and four rows take 46 us.
MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one sequence in a step; the first is at position ``begin``."""

    sequence: Hashable
    begin: int
    count: int


class MissingTokensError(Exception):
    """The cache lacks tokens that precede the tokens of a step."""


class Batch:
    """Sequences with adjacent memory and one row each in a step."""

    def __init__(self, run: Run, rows: Sequence[int], at: Sequence[int]) -> None:
        # ``rows``: indices in the step; ``at``: positions in the sequences.
        self.run, self.rows, self.at = run, torch.tensor(rows), torch.tensor(at)
        self._index: dict[int, Tensor] = {}

    def index(self, heads: int) -> Tensor:
        """Return the rows' indices in the run's memory, [key heads x sequences]."""
        found = self._index.get(heads)
        if found is None:
            slot = torch.arange(len(self.at)) + self.run.slot
            lines = torch.arange(heads)[:, None] + slot * heads
            found = (lines * self.run.tokens + self.at).reshape(-1)
            self._index[heads] = found
        return found


class KvCache:
    """KV cache of one stage; the attention needs memory in multiples of ``granule``."""

    def __init__(
        self,
        block_size: int = 16,
        attention: Callable[[KvCache, Sequence[Rows]], Attention] | None = None,
        granule: int | None = None,  # None: use ``block_size``
    ) -> None:
        self.block_size = block_size
        self.granule = block_size if granule is None else granule
        self._attention = attention or StepAttention
        self._memory = KvMemory(block_size)
        self._agreed: tuple[tuple[int, ...], int] | None = None
        self.lengths: dict[Hashable, int] = {}  # number of tokens of each sequence

    @torch.inference_mode()
    def free(self, sequence: Hashable) -> None:
        self._memory.free(sequence)
        self.lengths.pop(sequence, None)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def agree(self, keys: Sequence[int], count: int) -> tuple[tuple[int, ...], int]:
        """Return the key counts and the sequence count that suit all layers so far.

        A sequence has the same room in all layers, whose heads may differ in size.
        """
        if self._agreed is not None:
            known, most = self._agreed
            keys, count = [each for each in known if each in keys], min(most, count)
        self._agreed = tuple(keys), count
        return self._agreed

    def step(self, rows: Sequence[Rows]) -> Attention:
        """Return the attention function of one step.

        Sequences whose rows begin at 0 are freed first.
        """
        for each in rows:
            if each.begin == 0:
                self._memory.free(each.sequence)
            elif self.lengths.get(each.sequence, 0) < each.begin:
                raise MissingTokensError(f"tokens before {each.begin} are missing")
        for each in rows:
            self.lengths[each.sequence] = each.begin + each.count
        return self._attention(self, rows)

    def append(
        self, rows: Rows, layer: int, key: Tensor, value: Tensor, room: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, [key heads, rows, size]; return the full sequence."""
        end = rows.begin + rows.count
        # The memory between the end and ``room`` has arbitrary values, but no NaN.
        needed = max(end, room)
        self._memory.make_room(rows.sequence, needed, is_exact=room > 0)
        keys, values = self._memory.of(rows.sequence, layer, (key, value))
        keys[:, rows.begin : end] = key
        values[:, rows.begin : end] = value
        return keys[:, :needed], values[:, :needed]

    def make_room(self, rows: Sequence[Rows]) -> None:
        """Allocate memory for the rows of a step."""
        for each in rows:
            self._memory.make_room(each.sequence, each.begin + each.count)

    def addresses(
        self, rows: Sequence[Rows], layer: int, like: tuple[Tensor, Tensor]
    ) -> array[int]:
        """Return the ``Rows`` of the C code: six numbers for each sequence."""
        # The numbers: address of the keys, address of the values, capacity of each in
        # tokens, position of the first row, number of rows, and number of rows of the
        # sequences before this one in the step.
        found, offset = array("q"), 0
        for each in rows:
            keys, values, room = self._memory.address(each.sequence, layer, like)
            if each.begin + each.count > room:
                raise MissingTokensError(f"memory ends after {room} tokens")
            found.extend((keys, values, room, each.begin, each.count, offset))
            offset += each.count
        return found

    def batches(
        self,
        rows: Sequence[Rows],
        # Maps a sequence's length to the number of tokens to allocate. All sequences of
        # a batch have the same number.
        room: Callable[[int], int] | None = None,
        # Maximum number of sequences in a batch; the minimum is 2.
        max_count: int = SLOTS,
    ) -> tuple[list[Batch], list[tuple[int, Rows]]]:
        """Allocate memory; return the step's batches, and other rows with offsets."""
        single: dict[int, dict[Hashable, tuple[int, Rows]]] = {}
        others: list[tuple[int, Rows]] = []
        offset = 0
        for each in rows:
            end = each.begin + each.count
            tokens = end if room is None else room(end)
            is_exact = room is not None
            self._memory.make_room(each.sequence, tokens, is_exact=is_exact)
            if each.count == 1 and max_count > 1:
                same_size = single.setdefault(0 if room is None else tokens, {})
                same_size[each.sequence] = offset, each
            else:
                others.append((offset, each))
            offset += each.count
        found: list[Batch] = []
        for those in single.values():
            for run in self._memory.runs(list(those), max_count):
                mine = [those[sequence] for sequence in run.sequences]
                if len(mine) == 1:
                    others += mine
                    continue
                offsets, begins = zip(*((n, r.begin) for n, r in mine), strict=True)
                found.append(Batch(run, offsets, begins))
        return found, others

    def append_batch(
        self, batch: Batch, layer: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Append a batch; return its memory, [sequences, key heads, tokens, size]."""
        # The memory after the end of a sequence has arbitrary values, but no NaN.
        memory = self._memory.of_run(batch.run, layer, (key, value))
        end = batch.run.slot + len(batch.at)
        for whole, new in zip(memory, (key, value), strict=True):
            lines = whole.view(-1, whole.shape[-1])
            picked = new.index_select(1, batch.rows)
            lines.index_copy_(0, batch.index(len(new)), picked.flatten(0, 1))
        keys, values = (whole[batch.run.slot : end] for whole in memory)
        return keys, values

    def copied(self, sequence: Hashable, begin: int, end: int) -> Layers:
        """Return a copy of the keys and values at positions [begin, end)."""
        return {
            layer: (keys[:, begin:end].clone(), values[:, begin:end].clone())
            for layer, (keys, values) in self._memory.all_of(sequence).items()
        }

    @torch.inference_mode()
    def restore(
        self, sequence: Hashable, pieces: Sequence[Layers], tokens: int
    ) -> None:
        """Start a sequence of ``tokens`` tokens from copied keys and values."""
        self._memory.free(sequence)
        self._memory.make_room(sequence, tokens)
        self.lengths[sequence] = tokens
        for layer, like in pieces[0].items():
            kept = self._memory.of(sequence, layer, like)
            for number, tensor in enumerate(kept):
                parts = [piece[layer][number] for piece in pieces]
                tensor[:, :tokens] = torch.cat(parts, 1)[:, :tokens]


class StepAttention(Attention):
    """torch's attention of one step, batched for sequences with one row."""

    def __init__(self, cache: KvCache, rows: Sequence[Rows]) -> None:
        self._cache = cache
        self._batches, self._others = cache.batches(rows)
        ends = accumulate(each.count for each in rows)
        self._parts = [
            (end - each.count, each) for end, each in zip(ends, rows, strict=True)
        ]
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._seen_by: dict[tuple[Batch, int | None], tuple[slice, Tensor | None]] = {}

    def compute(self, call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        found = call.empty()
        for batch in self._batches if call.softcap is None else ():
            keys, values = self._cache.append_batch(batch, call.layer, key, value)
            seen, mask = self._seen(batch, call.window, query.dtype)
            query_rows = query.index_select(1, batch.rows)
            out = of_single_rows(
                query_rows, keys[:, :, seen], values[:, :, seen], mask, call.scale
            )
            found.index_copy_(0, batch.rows, out)
        for offset, rows in self._others if call.softcap is None else self._parts:
            here = slice(offset, offset + rows.count)
            keys, values = self._cache.append(
                rows, call.layer, key[:, here], value[:, here]
            )
            first = 0 if call.window is None else max(0, rows.begin - call.window + 1)
            mask = self._mask(rows, first, call.window)
            memory = keys[:, first:], values[:, first:]
            if call.softcap is None and rows.count == 1:
                one = memory[0][None], memory[1][None]
                found[here] = of_single_rows(query[:, here], *one, None, call.scale)
            else:
                out = of_rows(query[:, here], *memory, mask, call.scale, call.softcap)
                found[here] = out.transpose(0, 1)
        return found

    def _seen(
        self, batch: Batch, window: int | None, dtype: torch.dtype
    ) -> tuple[slice, Tensor | None]:
        known = self._seen_by.get((batch, window))
        if known is None:
            first = 0 if window is None else max(0, int(batch.at.min()) - window + 1)
            end = int(batch.at.max()) + 1
            of = torch.arange(first, end)
            mask = additive_mask(batch.at[:, None], of, window, dtype)
            is_needed = bool(mask.any())
            known = slice(first, end), mask[:, None, None] if is_needed else None
            self._seen_by[batch, window] = known
        return known

    def _mask(self, rows: Rows, first: int, window: int | None) -> Tensor | None:
        """Return which keys each row attends to, [rows, keys]; None: all of them."""
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


def additive_mask(
    at: Tensor, of: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return 0 for the keys ``of`` that the rows ``at`` attend to, otherwise -inf."""
    hidden = of > at
    if window is not None:
        hidden |= of <= at - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))


def of_single_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the attention of one row of each sequence, [sequences, heads, size]."""
    # Keys and values are [sequences, key heads, tokens, size]. Query heads that share
    # keys become rows of one head, because bfloat16 matmuls with a single row are
    # several times slower.
    sequences, heads = key.shape[:2]
    group = len(query) // heads
    rows = query.transpose(0, 1).reshape(sequences, heads, group, -1)
    if group == 1:
        rows = functional.pad(rows, (0, 0, 0, MIN_ROWS - 1))
    out = functional.scaled_dot_product_attention(
        rows, key, value, attn_mask=mask, scale=scale
    )
    return out[:, :, :group].reshape(sequences, len(query), -1)


def of_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,  # as in Gemma 2
) -> Tensor:
    """Return the attention of the rows of one sequence, [heads, rows, size]."""
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query[None],
            key[None],
            value[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )[0]
    return of_capped_rows(query, key, value, mask, scale, softcap)


def of_capped_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    softcap: float,
) -> Tensor:
    """Return the attention of rows, [..., heads, rows, size], with capped scores."""
    repeats = query.shape[-3] // key.shape[-3]
    key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = softcap * torch.tanh(query @ key.transpose(-1, -2) * scale / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
