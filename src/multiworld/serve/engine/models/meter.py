"""Measurement of the stages of a model, one after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from multiworld.serve.engine.models.integer_linear import IntegerLinear
from multiworld.serve.spec.datatypes import example_of
from multiworld.serve.spec.stage import Model, StageContext, StageFunction, Tensors

WARM_UP = 3  # untimed runs before the timed ones

Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured costs of one stage."""

    name: str
    seconds: Mapping[int, float]  # median seconds of a batch, by its number of rows
    weight_bytes: int  # bytes of the parameters; 0 if the stage is not an ``nn.Module``
    out_bytes: float  # bytes of the outputs of a row
    kv_bytes: float = 0.0  # bytes of a token's KV, if the model generates text
    kv_peak_bytes: int = 0  # peak bytes of KV blocks in the measurement


class Meter(Protocol):
    """Measures the stages of a model; each receives the outputs of the previous one."""

    def load(self, number: int) -> None:
        """Load a stage; they must be loaded in order."""

    def measure(self) -> Measured:
        """Run the loaded stage, measure it, and drop it."""


class BatchMeter:
    """Measures a model that takes batches, on copies of its example."""

    def __init__(
        self, model: Model, batches: Sequence[int], repeats: int, device: str = "cpu"
    ) -> None:
        self._model, self._repeats, self._device = model, repeats, device
        example = example_of(model)
        self._inputs = {rows: _repeated(example, rows, device) for rows in batches}
        self._name = ""
        self._function: StageFunction | None = None

    def load(self, number: int) -> None:
        stage = self._model.stages[number]
        self._name = stage.name or str(number)
        self._function = stage.load(StageContext(device=self._device))

    def measure(self) -> Measured:
        function, self._function = self._function, None
        assert function is not None
        seconds = {}
        for rows, tensors in self._inputs.items():
            run = _runner(function, tensors)
            seconds[rows], self._inputs[rows] = timed(run, self._repeats)
        rows, outputs = max(self._inputs.items())
        size = sum(t.numel() * t.element_size() for t in outputs.values())
        return Measured(self._name, seconds, parameter_bytes(function), size / rows)


def measured_stages(meter: Meter, count: int) -> list[Measured]:
    found = []
    for number in range(count):
        meter.load(number)
        found.append(meter.measure())
    return found


def _runner(function: StageFunction, tensors: Tensors) -> Callable[[], Tensors]:
    """Return a function that computes a batch and waits for its device."""

    def run() -> Tensors:
        with torch.inference_mode():
            # Copy the tensors, because a stage may overwrite those of a request.
            outputs = function({name: t.clone() for name, t in tensors.items()})
        for tensor in outputs.values():
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)
        return outputs

    return run


def _repeated(tensors: Tensors, rows: int, device: str) -> Tensors:
    """Return ``rows`` copies of the first row."""
    return {
        name: tensor[:1].repeat(rows, *[1] * (tensor.dim() - 1)).to(device)
        for name, tensor in tensors.items()
    }


def timed(run: Callable[[], Outcome], repeats: int) -> tuple[float, Outcome]:
    """Run a computation repeatedly; return its median time and last outcome."""
    for _ in range(WARM_UP):
        outcome = run()
    times: list[float] = []
    for _ in range(repeats):
        begin = time.perf_counter()
        outcome = run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), outcome


def parameter_bytes(function: object) -> int:
    """Return the size of a stage's parameters; 0 if it is not an ``nn.Module``."""
    if not isinstance(function, torch.nn.Module):
        return 0
    kept: list[torch.Tensor | IntegerLinear] = list(function.parameters())
    kept += (each for each in function.modules() if isinstance(each, IntegerLinear))
    return sum(each.nbytes for each in kept)
