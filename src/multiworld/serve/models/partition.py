"""How long each part of a model takes, what it holds, and where to cut it."""

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


@dataclass(frozen=True, slots=True)
class PartProfile:
    """One part, measured.

    Attributes:
        seconds: For one batch, median.
        parameter_bytes: Of its weights; 0 where the part is no ``nn.Module``.
        output_bytes: What goes to the next part.
    """

    name: str
    seconds: float
    parameter_bytes: int
    output_bytes: int


def profile(
    model: Model, *, rows: int = 1, repeats: int = 20, device: str = "cpu"
) -> list[PartProfile]:
    """Run the example through every stage in turn, and measure each.

    Args:
        rows: So many copies of the example make the batch.
        repeats: Times that each stage is run, after three that do not count.
        device: Where it runs.

    Raises:
        SpecError: The model has no example.
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
    """Return so many copies of a batch as one, on a device."""
    return {
        name: tensor.repeat(rows, *[1] * (tensor.dim() - 1)).to(device)
        for name, tensor in tensors.items()
    }


def timed(function: object, tensors: Tensors, repeats: int) -> tuple[float, Tensors]:
    """Run a stage on a batch; return its median seconds, and its outputs."""
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
    """Return the size of a stage's parameters; 0 if it is no ``nn.Module``."""
    if not isinstance(function, torch.nn.Module):
        return 0
    return sum(p.numel() * p.element_size() for p in function.parameters())


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain of parts, cut into stages.

    Attributes:
        begins: The first part of every stage.
        seconds: Of each stage.
    """

    begins: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def bottleneck(self) -> int:
        """The stage that takes longest."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


def cut(parts: Sequence[PartProfile], stages: int) -> Cut:
    """Cut a chain so that the longest stage is as short as can be.

    Raises:
        ValueError: There are fewer parts than stages.
    """
    seconds = [part.seconds for part in parts]
    spans = chain_partition(seconds, stages)
    return Cut(
        tuple(begin for begin, _ in spans),
        tuple(sum(seconds[begin:end]) for begin, end in spans),
    )
