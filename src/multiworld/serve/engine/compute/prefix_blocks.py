"""Blocks of prefixes: keys, values and output rows that several sequences use."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from multiworld.serve.text.prefixes import Digest
from multiworld.serve.wire.protocol import Key


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a prefix at one stage: keys and values by layer, and output rows."""

    layers: dict[int, tuple[Tensor, Tensor]]
    rows: Tensor | None = None

    @property
    def nbytes(self) -> int:
        kept = sum(key.nbytes + value.nbytes for key, value in self.layers.values())
        return kept + (0 if self.rows is None else self.rows.nbytes)


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A block of a prompt that a step completes, to be cached."""

    key: Key
    name: Digest  # digest of the prefix that ends with this block
    begin: int  # position of its first token
    end: int  # position after its last token
