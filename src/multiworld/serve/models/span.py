"""The range of layers that a stage owns. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Layers from ``begin`` to before ``end``, of ``count``."""

    begin: int
    end: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether the embeddings belong to it."""
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        """Whether what comes after the layers belongs to it."""
        return self.end == self.count
