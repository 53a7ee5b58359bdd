"""Profiler of the stages of a model: time, memory, and bytes sent to the next stage.
The profiler runs in a process of its own, and measures memory as the growth of that
process. Before each stage, the allocator returns freed memory to the system."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import torch

from multiworld.serve.engine.models.meter import Meter
from multiworld.serve.machines.usage import memory_of
from multiworld.serve.spec.profiles import ModelProfile, StageProfile
from multiworld.serve.spec.schema import ModelSpec


def profile_model(name: str, spec: ModelSpec, meter: Meter) -> ModelProfile:
    threads = spec.stages[0].threads
    torch.set_num_threads(threads)
    _release_memory()
    base = memory_of(os.getpid())
    found = []
    for number, stage in enumerate(spec.stages):
        torch.set_num_threads(stage.threads)
        measured = _measure(meter, number)
        title = stage.name or measured.name
        found.append(measured.model_copy(update={"name": title}))
    return ModelProfile(
        model=name,
        version=spec.version,
        device=spec.stages[0].device,
        threads=threads,
        base_bytes=base,
        dtype=(spec.generation and spec.generation.dtype) or "",
        stages=found,
    )


def _measure(meter: Meter, number: int) -> StageProfile:
    _release_memory()
    before = memory_of(os.getpid())
    meter.load(number)
    _release_memory()
    loaded = max(0, memory_of(os.getpid()) - before)
    _reset_peak()
    resting = _resident("VmRSS")
    found = meter.measure()
    # Subtract the memory of KV blocks, because it is booked separately.
    grown = max(0, _resident("VmHWM") - resting - found.kv_peak_bytes)
    return StageProfile(
        name=found.name,
        weight_bytes=found.weight_bytes,
        loaded_bytes=loaded,
        peak_bytes=loaded + grown,
        out_bytes=found.out_bytes,
        seconds=dict(found.seconds),
        kv_bytes=found.kv_bytes,
    )


def _release_memory() -> None:
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        pass  # the C library is not glibc, and has no ``malloc_trim``


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # the measured peak then includes the peak of earlier stages


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
