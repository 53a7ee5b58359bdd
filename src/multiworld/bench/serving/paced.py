"""Stages that take a given time for each row: what is scaled by load in benchmarks."""

from __future__ import annotations

import time

import torch

from multiworld.serve import Model, Stage, StageContext, Tensors, TensorSpec
from multiworld.serve.stage import StageFunction


def _stage(ms: float) -> Stage:
    def load(context: StageContext) -> StageFunction:
        def run(batch: Tensors) -> Tensors:
            time.sleep(ms / 1000 * len(batch["x"]))
            return {"x": batch["x"]}

        return run

    return Stage(load=load, name=f"{ms:g}ms")


def model(ms: tuple[float, ...] = (10.0, 30.0)) -> Model:
    """Return a stage for each number of milliseconds; they sleep, and use no core."""
    spec = [TensorSpec("x", "FP32", (-1,))]
    return Model(
        stages=[_stage(one) for one in ms],
        inputs=spec,
        outputs=spec,
        example=lambda: {"x": torch.ones(1)},
    )
