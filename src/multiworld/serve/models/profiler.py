"""Profiler of the stages of a model: time, memory and bytes per hop. Shell.

It runs in a process of its own (``multiworld profile``) and measures memory as the
growth of that process. Before each stage, the allocator returns the memory that it kept
from the previous one.
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
    """Measure every stage of a model with its example, in this process.

    Args:
        name: Name of the model.
        spec: Spec of the model.
        model: The model.
        batches: Batch sizes, as numbers of copies of the example.
        repeats: Timed runs of each stage and batch size.
        device: Torch device to run on.

    Raises:
        SpecError: The model has neither ``example`` nor ``inputs``.
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
        pass  # the C library is not glibc


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the peak then includes earlier stages


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
