"""Models without computation, which show the overhead of serving."""

from __future__ import annotations

import time

from multiworld.serve import Model, Stage, Tensors, TensorSpec

SLOW_S = 0.05
"""Seconds that a slow stage sleeps for a batch."""


def empty(stages: int) -> Model:
    """Return a model whose stages return their input."""
    loaded = Stage(load=lambda context: lambda tensors: tensors)
    return _model([loaded for _ in range(stages)])


def slow(stages: int) -> Model:
    """Return a model whose stages take ``SLOW_S``, so that work is always in flight."""

    def sleep(tensors: Tensors) -> Tensors:
        time.sleep(SLOW_S)
        return tensors

    return _model([Stage(load=lambda context: sleep) for _ in range(stages)])


def _model(stages: list[Stage]) -> Model:
    number = TensorSpec("x", "FP32", (-1,))
    return Model(stages=stages, inputs=[number], outputs=[number])
