"""Model whose stages sleep a given time for each row, for scaling benchmarks."""

from __future__ import annotations

import os
import signal
import time

import torch

from multiworld.serve import Model, Stage, StageContext, Tensors, TensorSpec
from multiworld.serve.spec.stage import StageFunction


def _stage(ms: float, is_mortal: bool) -> Stage:
    def load(context: StageContext) -> StageFunction:
        def run(batch: Tensors) -> Tensors:
            if is_mortal and bool((batch["x"] < 0).any()):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(ms / 1000 * len(batch["x"]))
            return {"x": batch["x"]}

        return run

    return Stage(load=load, name=f"{ms:g}ms")


def model(ms: tuple[float, ...] = (10.0, 30.0), is_mortal: bool = False) -> Model:
    """Return a model with one stage for each number of milliseconds per row."""
    # The stages sleep and use no core. ``is_mortal``: a negative input kills the
    # replica that computes it.
    spec = [TensorSpec("x", "FP32", (-1,))]
    return Model(
        stages=[_stage(one, is_mortal) for one in ms],
        inputs=spec,
        outputs=spec,
        example=lambda: {"x": torch.ones(1)},
    )
