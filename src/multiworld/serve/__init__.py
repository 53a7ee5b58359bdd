"""Serving models: pipelines of replicated stages, behind HTTP.

``multiworld serve app.yaml`` runs a service; a model's factory uses ``Model`` and
``Stage``. Needs the extra ``multiworld-elastic[serve]``.
"""

from __future__ import annotations

from multiworld.serve.spec.module import Module
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
    "Module",
    "Stage",
    "StageContext",
    "TensorSpec",
    "Tensors",
    "TextFrontend",
]
