"""The range of layers that a stage owns. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Layers ``begin`` to ``end`` (exclusive) of a model with ``count`` layers."""

    begin: int
    end: int
    count: int

    @property
    def is_first(self) -> bool:
        """True if the span includes the embeddings."""
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        """True if the span includes the modules after the last layer."""
        return self.end == self.count
