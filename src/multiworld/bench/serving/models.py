"""Pipelines that show what the machinery costs: factories of a service."""

from __future__ import annotations

import time

from multiworld.serve import Model, Stage, Tensors, TensorSpec

SLOW_S = 0.05


def empty(stages: int) -> Model:
    """Return stages that do nothing."""
    loaded = Stage(load=lambda context: lambda tensors: tensors)
    return _model([loaded for _ in range(stages)])


def slow(stages: int) -> Model:
    """Return stages that take 50 ms, so that there is always work in flight."""

    def sleep(tensors: Tensors) -> Tensors:
        time.sleep(SLOW_S)
        return tensors

    return _model([Stage(load=lambda context: sleep) for _ in range(stages)])


def _model(stages: list[Stage]) -> Model:
    number = TensorSpec("x", "FP32", (-1,))
    return Model(stages=stages, inputs=[number], outputs=[number])
