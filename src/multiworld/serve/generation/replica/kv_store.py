"""What a stage engine needs of its KV memory, on whatever device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor

from multiworld.serve.generation.replica.kv_cache import Attention, Rows

# Keys and values by layer, [key heads, tokens, size] each, on the host.
Layers = dict[int, tuple[Tensor, Tensor]]


class KvStore(Protocol):
    """Keys and values of the sequences of one stage."""

    @property
    def granule(self) -> int:
        """Tokens in multiples of which memory is allocated."""

    @property
    def nbytes(self) -> int:
        """Bytes in use."""

    @property
    def lengths(self) -> dict[Hashable, int]:
        """Number of tokens of each sequence."""

    def step(self, rows: Sequence[Rows]) -> Attention:
        """Return the attention of one step; sequences at position 0 start anew."""
        # MissingTokensError: tokens before those of the step were never computed.

    def free(self, sequence: Hashable) -> None:
        """Free the memory of a sequence, if it has any."""

    def copied(self, sequence: Hashable, begin: int, end: int) -> Layers:
        """Return a copy of the keys and values at positions [begin, end)."""

    def restore(
        self, sequence: Hashable, pieces: Sequence[Layers], tokens: int
    ) -> None:
        """Start a sequence with ``pieces`` that were computed before."""
