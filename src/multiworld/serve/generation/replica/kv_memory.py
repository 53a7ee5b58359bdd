"""KV memory of sequences, several side by side.

Attention of one row at a time spends more on the calls than on the arithmetic. So
sequences of about the same length share tensors, [places, heads, tokens, size], and one
call processes several of them. The places of one size have no gaps: when a sequence
leaves, the last one moves into its place, so a size has at most ``PLACES - 1`` empty
ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multiworld.serve.generation.engine_limits import GROWTH

PLACES = 4
"""Maximum number of sequences that share tensors. SmolLM2 in float32 on two cores, 160
keys: one row takes 47 us, four together 100, eight 160."""

SHARED_TOKENS = 1024
"""Maximum tokens of all places of a tensor. Attention of longer sequences is bound by
arithmetic, not by calls."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


@dataclass(slots=True)
class _Shelf:
    """Sequences of one size, by place, and their slabs: shared tensors by layer."""

    tokens: int
    sequences: list[Hashable] = field(default_factory=list)
    slabs: list[dict[int, Pair]] = field(default_factory=list)

    @property
    def places(self) -> int:
        """Places per slab."""
        return max(1, min(PLACES, SHARED_TOKENS // self.tokens))


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences with adjacent memory; ``slab`` and ``place`` locate the first one."""

    tokens: int
    slab: int
    place: int
    sequences: tuple[Hashable, ...]


class KvMemory:
    """KV memory of one stage; sizes are multiples of ``block_size`` tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._shelves: dict[int, _Shelf] = {}
        self._found: dict[Hashable, tuple[_Shelf, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the places of all sequences."""
        return sum(
            tensor[0].nbytes
            for shelf, place in self._found.values()
            for pair in shelf.slabs[place // shelf.places].values()
            for tensor in pair
        )

    def size_for(self, tokens: int) -> int:
        """Return the smallest size for a number of tokens."""
        size = block = self._block_size
        while size < tokens:
            size = max(size + block, -(-int(GROWTH * size) // block) * block)
        return size

    def make_room(
        self, sequence: Hashable, tokens: int, *, is_exact: bool = False
    ) -> None:
        """Allocate memory for ``tokens`` tokens of a sequence; what it has is kept.

        Unwritten tokens are zero. ``is_exact`` only rounds the size up to blocks.
        """
        found = self._found.get(sequence)
        if found is not None and found[0].tokens >= tokens:
            return
        size = -(-tokens // self._block_size) * self._block_size
        if not is_exact:
            size = self.size_for(tokens)
        shelf = self._shelves.setdefault(size, _Shelf(size))
        number, place = divmod(len(shelf.sequences), shelf.places)
        if number == len(shelf.slabs):
            shelf.slabs.append({})
        shelf.sequences.append(sequence)
        _clear(shelf.slabs[number].values(), place)
        if found is not None:
            old, at = found
            for layer, pair in old.slabs[at // old.places].items():
                made = self._layer(shelf, number, layer, pair)
                for source, target in zip(pair, made, strict=True):
                    target[place, :, : old.tokens] = source[at % old.places]
            self._leave(old, at)
        self._found[sequence] = shelf, len(shelf.sequences) - 1

    def free(self, sequence: Hashable) -> None:
        found = self._found.pop(sequence, None)
        if found is not None:
            self._leave(*found)

    def of(self, sequence: Hashable, layer: int, like: Pair) -> Pair:
        """Return the memory of a sequence, [heads, tokens, size] each."""
        shelf, at = self._found[sequence]
        number, place = divmod(at, shelf.places)
        keys, values = self._layer(shelf, number, layer, like)
        return keys[place], values[place]

    def all_of(self, sequence: Hashable) -> dict[int, Pair]:
        """Return the memory of a sequence by layer; empty if it has none."""
        found = self._found.get(sequence)
        if found is None:
            return {}
        shelf, at = found
        number, place = divmod(at, shelf.places)
        layers = shelf.slabs[number].items()
        return {name: (pair[0][place], pair[1][place]) for name, pair in layers}

    def runs(self, sequences: Sequence[Hashable], most: int = PLACES) -> list[Run]:
        """Group sequences that have memory into runs of at most ``most``."""
        found: list[Run] = []
        at = sorted((self._found[s][0].tokens, self._found[s][1]) for s in sequences)
        begin = 0
        for end in range(1, len(at) + 1):
            size, first = at[begin]
            places = self._shelves[size].places
            goes_on = end < len(at) and at[end] == (size, first + end - begin)
            if goes_on and end - begin < most and at[end][1] % places:
                continue
            those = self._shelves[size].sequences[first : first + end - begin]
            number, place = divmod(first, places)
            found.append(Run(size, number, place, tuple(those)))
            begin = end
        return found

    def of_run(self, run: Run, layer: int, like: Pair) -> Pair:
        """Return the slab that a run is in, [places, heads, tokens, size] each."""
        return self._layer(self._shelves[run.tokens], run.slab, layer, like)

    def _layer(self, shelf: _Shelf, number: int, layer: int, like: Pair) -> Pair:
        """Return the tensors of a slab for a layer; allocate them if necessary."""
        slab = shelf.slabs[number]
        found = slab.get(layer)
        if found is None:
            # The system allocates memory only when it is written to.
            keys, values = (
                torch.empty(
                    (shelf.places, each.shape[-3], shelf.tokens, each.shape[-1]),
                    dtype=each.dtype,
                    device=each.device,
                )
                for each in like
            )
            used = min(len(shelf.sequences) - number * shelf.places, shelf.places)
            for place in range(used):
                _clear([(keys, values)], place)
            found = slab[layer] = keys, values
        return found

    def _leave(self, shelf: _Shelf, at: int) -> None:
        """Remove a sequence from its place, which the last one of its size takes."""
        moved, last = shelf.sequences.pop(), len(shelf.sequences)
        if at != last:
            number, place = divmod(at, shelf.places)
            source = shelf.slabs[last // shelf.places]
            _clear(shelf.slabs[number].values(), place)
            for layer, pair in source.items():
                made = self._layer(shelf, number, layer, pair)
                for old, new in zip(pair, made, strict=True):
                    new[place] = old[last % shelf.places]
            shelf.sequences[at] = moved
            self._found[moved] = shelf, at
        if last % shelf.places == 0:
            del shelf.slabs[-1]
        if not shelf.sequences:
            del self._shelves[shelf.tokens]


def _clear(pairs: Iterable[Pair], place: int) -> None:
    for pair in pairs:
        for tensor in pair:
            tensor[place].zero_()
