"""Measurement of the parts of a model, and the best cut into stages. Shell."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from multiworld.serve.models.chain_partition import chain_partition
from multiworld.serve.spec.datatypes import example_of
from multiworld.serve.spec.stage import Model, StageContext, Tensors

WARM_UP = 3
"""Runs of a part before those that are timed."""


@dataclass(frozen=True, slots=True)
class PartProfile:
    """Measured costs of one part.

    Attributes:
        name: Name of the part.
        seconds: Median seconds for one batch.
        parameter_bytes: Size of the parameters; 0 if the part is not an ``nn.Module``.
        output_bytes: Size of the outputs for one batch.
    """

    name: str
    seconds: float
    parameter_bytes: int
    output_bytes: int


def profile(
    model: Model, *, rows: int = 1, repeats: int = 20, device: str = "cpu"
) -> list[PartProfile]:
    """Run the example through every stage in turn, and measure each stage.

    Args:
        model: The model.
        rows: Number of copies of the example in the batch.
        repeats: Timed runs of each stage, after ``WARM_UP`` others.
        device: Torch device to run on.

    Raises:
        SpecError: The model has neither ``example`` nor ``inputs``.
    """
    tensors = repeated(example_of(model), rows, device)
    found: list[PartProfile] = []
    with torch.inference_mode():
        for number, stage in enumerate(model.stages):
            function = stage.load(StageContext(device=device))
            seconds, outputs = timed(function, tensors, repeats)
            found.append(
                PartProfile(
                    stage.name or str(number),
                    seconds,
                    parameter_bytes(function),
                    sum(t.numel() * t.element_size() for t in outputs.values()),
                )
            )
            tensors = outputs
            del function
    return found


def repeated(tensors: Tensors, rows: int, device: str) -> Tensors:
    """Return copies of a batch as one batch.

    Args:
        tensors: The batch; dimension 0 holds the rows.
        rows: Number of copies.
        device: Torch device of the result.
    """
    return {
        name: tensor.repeat(rows, *[1] * (tensor.dim() - 1)).to(device)
        for name, tensor in tensors.items()
    }


def timed(function: object, tensors: Tensors, repeats: int) -> tuple[float, Tensors]:
    """Run a stage on a batch; return its median seconds and its outputs.

    Args:
        function: Function of the stage.
        tensors: Inputs of one batch.
        repeats: Timed runs, after ``WARM_UP`` others.
    """
    assert callable(function)
    outputs: Tensors = {}
    times: list[float] = []
    for number in range(WARM_UP + repeats):
        begin = time.perf_counter()
        outputs = function(dict(tensors))
        for tensor in outputs.values():
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        if number >= WARM_UP:
            times.append(time.perf_counter() - begin)
    return statistics.median(times), outputs


def parameter_bytes(function: object) -> int:
    """Return the size of a stage's parameters; 0 if it is not an ``nn.Module``."""
    if not isinstance(function, torch.nn.Module):
        return 0
    return sum(p.numel() * p.element_size() for p in function.parameters())


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain of parts, cut into stages.

    Attributes:
        begins: Number of the first part of each stage.
        seconds: Seconds for one batch in each stage.
    """

    begins: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def bottleneck(self) -> int:
        """The number of the slowest stage."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


def cut(parts: Sequence[PartProfile], stages: int) -> Cut:
    """Cut a chain of parts so that the slowest stage is as fast as possible.

    Raises:
        ValueError: There are fewer parts than stages.
    """
    seconds = [part.seconds for part in parts]
    spans = chain_partition(seconds, stages)
    return Cut(
        tuple(begin for begin, _ in spans),
        tuple(sum(seconds[begin:end]) for begin, end in spans),
    )
