"""KV memory in which sequences of about the same length are adjacent.

For a single row, attention spends more time on calls than on arithmetic. So sequences
of about the same length share a slab, [slots, heads, tokens, size] for keys and the
same for values, and one call processes several of them. The used slots of a size class
have no gaps: when a sequence leaves, the last one of the class moves into its slot, so
at most ``SLOTS - 1`` slots are empty.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multiworld.serve.text.engine_limits import GROWTH

# Maximum number of sequences in a slab. For SmolLM2 in float32 on two cores with 160
# keys, one row takes 47 us, four rows together take 100 us, and eight take 160 us.
SLOTS = 4
# Maximum number of tokens in a slab of several sequences: with more, attention is
# limited by arithmetic, not by the number of calls.
SHARED_TOKENS = 1024
Pair = tuple[Tensor, Tensor]  # keys and values


@dataclass(slots=True)
class _SizeClass:
    """Sequences of one size, by slot, and their slabs: tensors by layer."""

    tokens: int
    sequences: list[Hashable] = field(default_factory=list)
    slabs: list[dict[int, Pair]] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return max(1, min(SLOTS, SHARED_TOKENS // self.tokens))


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences with adjacent memory; ``slab`` and ``slot`` locate the first one."""

    tokens: int
    slab: int
    slot: int
    sequences: tuple[Hashable, ...]


class KvMemory:
    """KV memory of one stage; sizes are multiples of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._size_classes: dict[int, _SizeClass] = {}
        self._found: dict[Hashable, tuple[_SizeClass, int]] = {}

    @property
    def nbytes(self) -> int:
        return sum(
            tensor[0].nbytes
            for size_class, slot in self._found.values()
            for pair in size_class.slabs[slot // size_class.slots].values()
            for tensor in pair
        )

    def size_for(self, tokens: int) -> int:
        size = block = self._block_size
        while size < tokens:
            size = max(size + block, -(-int(GROWTH * size) // block) * block)
        return size

    def make_room(
        self, sequence: Hashable, tokens: int, *, is_exact: bool = False
    ) -> None:
        """Grow a sequence's memory to ``tokens`` tokens; new memory is zeroed."""
        found = self._found.get(sequence)
        if found is not None and found[0].tokens >= tokens:
            return
        size = -(-tokens // self._block_size) * self._block_size
        if not is_exact:  # an exact size is only rounded up to whole blocks
            size = self.size_for(tokens)
        size_class = self._size_classes.setdefault(size, _SizeClass(size))
        number, slot = divmod(len(size_class.sequences), size_class.slots)
        if number == len(size_class.slabs):
            size_class.slabs.append({})
        size_class.sequences.append(sequence)
        _clear(size_class.slabs[number].values(), slot)
        if found is not None:
            old, at = found
            for layer, pair in old.slabs[at // old.slots].items():
                made = self._layer(size_class, number, layer, pair)
                for source, target in zip(pair, made, strict=True):
                    target[slot, :, : old.tokens] = source[at % old.slots]
            self._leave(old, at)
        self._found[sequence] = size_class, len(size_class.sequences) - 1

    def free(self, sequence: Hashable) -> None:
        found = self._found.pop(sequence, None)
        if found is not None:
            self._leave(*found)

    def of(self, sequence: Hashable, layer: int, like: Pair) -> Pair:
        """Return a sequence's key and value memory: [heads, tokens, size] each."""
        size_class, at = self._found[sequence]
        number, slot = divmod(at, size_class.slots)
        keys, values = self._layer(size_class, number, layer, like)
        return keys[slot], values[slot]

    def address(
        self, sequence: Hashable, layer: int, like: Pair
    ) -> tuple[int, int, int]:
        """Return the addresses of a sequence's keys and values, and their capacity."""
        size_class, at = self._found[sequence]
        number, slot = divmod(at, size_class.slots)
        pair = size_class.slabs[number].get(layer)
        keys, values = pair or self._layer(size_class, number, layer, like)
        for kept, given in zip((keys, values), like, strict=True):
            is_same = kept.shape[-3::2] == given.shape[-3::2]
            if not is_same or kept.dtype is not given.dtype:
                raise ValueError(
                    f"layer {layer} changed the shape or dtype of its keys or values"
                )
        of_keys, of_values = slot * keys.stride(0), slot * values.stride(0)
        return (
            keys.data_ptr() + of_keys * keys.itemsize,
            values.data_ptr() + of_values * values.itemsize,
            size_class.tokens,
        )

    def all_of(self, sequence: Hashable) -> dict[int, Pair]:
        """Return the memory of a sequence by layer; empty if it has none."""
        found = self._found.get(sequence)
        if found is None:
            return {}
        size_class, at = found
        number, slot = divmod(at, size_class.slots)
        layers = size_class.slabs[number].items()
        return {name: (pair[0][slot], pair[1][slot]) for name, pair in layers}

    def runs(self, sequences: Sequence[Hashable], max_count: int = SLOTS) -> list[Run]:
        """Group sequences into runs of at most ``max_count`` with adjacent memory."""
        found: list[Run] = []
        at = sorted((self._found[s][0].tokens, self._found[s][1]) for s in sequences)
        begin = 0
        for end in range(1, len(at) + 1):
            size, first = at[begin]
            slots = self._size_classes[size].slots
            continues = end < len(at) and at[end] == (size, first + end - begin)
            if continues and end - begin < max_count and at[end][1] % slots:
                continue
            those = self._size_classes[size].sequences[first : first + end - begin]
            number, slot = divmod(first, slots)
            found.append(Run(size, number, slot, tuple(those)))
            begin = end
        return found

    def of_run(self, run: Run, layer: int, like: Pair) -> Pair:
        """Return the slab that a run is in, [slots, heads, tokens, size] each."""
        return self._layer(self._size_classes[run.tokens], run.slab, layer, like)

    def _layer(
        self, size_class: _SizeClass, number: int, layer: int, like: Pair
    ) -> Pair:
        """Return the tensors of a slab for a layer; allocate them if necessary."""
        slab = size_class.slabs[number]
        found = slab.get(layer)
        if found is None:
            # Untouched parts cost nothing: the system provides memory only when it is
            # written to.
            keys, values = (
                torch.empty(
                    (
                        size_class.slots,
                        each.shape[-3],
                        size_class.tokens,
                        each.shape[-1],
                    ),
                    dtype=each.dtype,
                    device=each.device,
                )
                for each in like
            )
            used = min(
                len(size_class.sequences) - number * size_class.slots, size_class.slots
            )
            for slot in range(used):
                _clear([(keys, values)], slot)
            found = slab[layer] = keys, values
        return found

    def _leave(self, size_class: _SizeClass, at: int) -> None:
        """Remove a sequence from its slot, and move the last one of its size there."""
        moved, last = size_class.sequences.pop(), len(size_class.sequences)
        if at != last:
            number, slot = divmod(at, size_class.slots)
            source = size_class.slabs[last // size_class.slots]
            _clear(size_class.slabs[number].values(), slot)
            for layer, pair in source.items():
                made = self._layer(size_class, number, layer, pair)
                for old, new in zip(pair, made, strict=True):
                    new[slot] = old[last % size_class.slots]
            size_class.sequences[at] = moved
            self._found[moved] = size_class, at
        if last % size_class.slots == 0:
            del size_class.slabs[-1]
        if not size_class.sequences:
            del self._size_classes[size_class.tokens]


def _clear(pairs: Iterable[Pair], slot: int) -> None:
    for pair in pairs:
        for tensor in pair:
            tensor[slot].zero_()
