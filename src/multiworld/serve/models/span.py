"""The span of layers that a stage loads; imports nothing heavy. Shell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multiworld.serve.spec.stage import StageContext, Tensors


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous span of a model's layers.

    Attributes:
        begin: Number of the first layer.
        end: Number of the layer after the last.
        count: Number of layers of the whole model.
    """

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


def load_stage(
    folder: Path, span: Span, dtype: str, pooling: str | None, context: StageContext
) -> Callable[[Tensors], Tensors]:
    """Load one stage of the model in a folder; see ``transformer_stage.load``.

    Args:
        folder: Hugging Face folder of the model.
        span: Layers of the stage.
        dtype: Name of the torch dtype to compute in.
        pooling: ``mean`` or ``cls`` for a sentence encoder; None for other models.
        context: Device and ranks of the replica.
    """
    from multiworld.serve.models import transformer_stage

    return transformer_stage.load(folder, span, dtype, pooling, context.device)
