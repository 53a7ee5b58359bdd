"""The description of a model: alias of ``multiworld.serve.spec.stage``."""

from __future__ import annotations

from multiworld.serve.spec.stage import (
    Generation,
    Model,
    Stage,
    StageContext,
    Tensors,
    TensorSpec,
    TextFrontend,
)

__all__ = [
    "Generation",
    "Model",
    "Stage",
    "StageContext",
    "TensorSpec",
    "Tensors",
    "TextFrontend",
]
