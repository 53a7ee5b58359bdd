"""Model with answers that are easy to check, and with faults on request."""

from __future__ import annotations

import os
import re
import time

import torch

from multiworld.serve import Model, Stage, StageContext, Tensors, TensorSpec

FINE, RAISE, DIE, SLEEP, REFUSE, SLOW, HANG, GROW, HOLD = range(9)
"""Behaviours of the second stage, which each row's ``code`` selects."""

SLEEP_S = 1.0
SLOW_S = 0.02
"""Seconds that the codes SLEEP and SLOW hold the compute thread."""
GROW_BYTES = 400 << 20

kept: list[torch.Tensor] = []
"""Memory that a replica with the code GROW never frees."""


def expected(x: float) -> float:
    return (2 * x + 1) ** 2


def double(tensors: Tensors) -> Tensors:
    return {"x": tensors["x"] * 2, "code": tensors["code"]}


def add(tensors: Tensors) -> Tensors:
    """Compute stage 1, or misbehave as the row's ``code`` says."""
    codes = set(tensors["code"].tolist())
    if DIE in codes:
        os._exit(3)
    if RAISE in codes:
        raise RuntimeError("as asked")
    if SLEEP in codes:
        time.sleep(SLEEP_S)
    if GROW in codes:
        kept.append(torch.ones(GROW_BYTES, dtype=torch.uint8))
        time.sleep(SLEEP_S)
    while HANG in codes:
        time.sleep(SLOW_S)
    if HOLD in codes:  # the GIL, for ever
        re.match("(a+)+$", "a" * 64 + "b")
    if SLOW in codes:
        time.sleep(SLOW_S)
    return {"x": tensors["x"] + 1}


def square(tensors: Tensors) -> Tensors:
    return {"y": tensors["x"] ** 2}


def model(breaks: bool = False) -> Model:
    """Return the model; with ``breaks``, it dies while it loads."""

    def load_add(context: StageContext) -> object:
        if breaks:
            os._exit(4)
        return add

    return Model(
        stages=[
            Stage(name="double", load=lambda context: double),
            Stage(name="add", load=load_add),  # type: ignore[arg-type]
            Stage(name="square", load=lambda context: square),
        ],
        inputs=[TensorSpec("x", "FP32", (-1,)), TensorSpec("code", "INT64", (-1,))],
        outputs=[TensorSpec("y", "FP32", (-1,))],
        example=lambda: {
            "x": torch.ones(1),
            "code": torch.zeros(1, dtype=torch.int64),
        },
    )
