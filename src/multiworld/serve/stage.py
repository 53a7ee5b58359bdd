"""The description of a model: alias of ``multiworld.serve.spec.stage``. Shell."""

from __future__ import annotations

from multiworld.serve.spec.stage import (
    Model,
    Stage,
    StageContext,
    Tensors,
    TensorSpec,
    TextFrontend,
)

__all__ = ["Model", "Stage", "StageContext", "TensorSpec", "Tensors", "TextFrontend"]
