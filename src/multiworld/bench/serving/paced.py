"""Stages that take a given time for each row: what is scaled by load in benchmarks."""

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
    """Return a stage for each number of milliseconds; they sleep, and use no core.

    Args:
        is_mortal: A negative number kills the replica that computes it.
    """
    spec = [TensorSpec("x", "FP32", (-1,))]
    return Model(
        stages=[_stage(one, is_mortal) for one in ms],
        inputs=spec,
        outputs=spec,
        example=lambda: {"x": torch.ones(1)},
    )
