"""Which part of a folder a stage loads. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multiworld.serve.spec.stage import StageContext, Tensors


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


def load_stage(
    folder: Path, span: Span, dtype: str, pooling: str | None, context: StageContext
) -> Callable[[Tensors], Tensors]:
    """Load one stage of the model in a folder; see ``transformer_stage.load``."""
    from multiworld.serve.models import transformer_stage

    return transformer_stage.load(folder, span, dtype, pooling, context.device)
