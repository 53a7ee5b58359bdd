"""What the stages of a model need, measured: time, memory, bytes per hop. Shell.

Runs in a process that does nothing else: ``multiworld profile``. Memory is what the
process grows by, after the allocator was asked to give back what it kept of the stage
before.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from multiworld.serve.models.partition import parameter_bytes, repeated, timed
from multiworld.serve.resources.usage import memory_of
from multiworld.serve.spec.datatypes import example_of
from multiworld.serve.spec.profiles import ModelProfile, StageProfile
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.spec.stage import Model, Stage, StageContext, Tensors


def profile_model(
    name: str,
    spec: ModelSpec,
    model: Model,
    batches: Sequence[int],
    repeats: int,
    device: str = "cpu",
) -> ModelProfile:
    """Measure every stage of a model with its own example, in this process.

    Args:
        batches: Rows of the batches, each a number of copies of the example.

    Raises:
        SpecError: The model has no example.
    """
    threads = spec.stages[0].threads
    torch.set_num_threads(threads)
    inputs = {rows: repeated(example_of(model), rows, device) for rows in batches}
    _release_memory()
    base = memory_of(os.getpid())
    found = []
    with torch.inference_mode():
        for number, stage in enumerate(model.stages):
            title = spec.stages[number].name or stage.name or str(number)
            measured, inputs = _measure(title, stage, inputs, repeats, device)
            found.append(measured)
            _release_memory()
    return ModelProfile(
        model=name,
        version=spec.version,
        device=device,
        threads=threads,
        base_bytes=base,
        stages=found,
    )


def _measure(
    name: str, stage: Stage, inputs: dict[int, Tensors], repeats: int, device: str
) -> tuple[StageProfile, dict[int, Tensors]]:
    before = memory_of(os.getpid())
    function = stage.load(StageContext(device=device))
    loaded = memory_of(os.getpid()) - before
    _reset_peak()
    resting = _resident("VmRSS")
    seconds, outputs = {}, {}
    for rows, tensors in inputs.items():
        seconds[rows], outputs[rows] = timed(function, tensors, repeats)
    grown = max(0, _resident("VmHWM") - resting)
    rows = max(inputs)
    size = sum(t.numel() * t.element_size() for t in outputs[rows].values())
    measured = StageProfile(
        name=name,
        weight_bytes=parameter_bytes(function),
        loaded_bytes=max(0, loaded),
        peak_bytes=max(0, loaded) + grown,
        out_bytes=size / rows,
        seconds=seconds,
    )
    return measured, outputs


def _release_memory() -> None:
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # another C library


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak is then the largest of all stages


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
