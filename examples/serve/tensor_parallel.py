"""Tensor parallelism: a stage whose replicas are two processes each.

    cd examples/serve
    multiworld serve tensor_parallel.yaml

A layer too large for one device is cut. Each rank holds half of the hidden units, and
an ``all_reduce`` adds up the ranks' partial results. If either rank is lost, the whole
replica is lost and replaced, and its requests are replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multiworld.serve import Model, Stage, StageContext, Tensors, TensorSpec

WIDTH, HIDDEN = 16, 64


def weights() -> tuple[Tensor, Tensor]:
    """Return the two matrices of the layer, [WIDTH, HIDDEN] and [HIDDEN, WIDTH]."""
    draw = torch.Generator().manual_seed(1)
    up = torch.randn(WIDTH, HIDDEN, generator=draw)
    down = torch.randn(HIDDEN, WIDTH, generator=draw)
    return up, down


def whole(x: Tensor) -> Tensor:
    """Return the layer's output [rows, WIDTH] for x [rows, WIDTH], in one process."""
    up, down = weights()
    return (x @ up).relu() @ down


def load(context: StageContext) -> ParallelLayer:
    """Load this rank's share of the weights."""
    return ParallelLayer(context)


class ParallelLayer:
    """One rank's share of the layer."""

    def __init__(self, context: StageContext) -> None:
        assert context.group is not None, "set `ranks: 2` on this stage in the spec"
        self._group = context.group
        rank, size = self._group.rank, self._group.size
        up, down = weights()
        self._up = up.chunk(size, dim=1)[rank]
        self._down = down.chunk(size, dim=0)[rank]

    def __call__(self, tensors: Tensors) -> Tensors:
        """Return the sum of all ranks' partial results for x [rows, WIDTH]."""
        partial = (tensors["x"] @ self._up).relu() @ self._down
        return {"y": self._group.all_reduce(partial)}


def model() -> Model:
    """Return a model with the layer as its only stage."""
    return Model(
        stages=[Stage(name="layer", load=load)],
        inputs=[TensorSpec("x", "FP32", (-1, WIDTH))],
        outputs=[TensorSpec("y", "FP32", (-1, WIDTH))],
    )
