"""Inventory of this machine: limits of the container, and GPUs that answer or fail."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from multiworld.serve.machines import inventory
from multiworld.serve.machines.amounts import Gpu
from multiworld.serve.machines.inventory import gpus, numa_node_bytes, this_node

MIB = 2**20


@pytest.fixture(autouse=True)
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(inventory, "CGROUP", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return tmp_path


def driver(**changes: Any) -> SimpleNamespace:
    """Return a fake NVML with two GPUs, some of its calls replaced."""
    calls = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: ["A100", b"H200"][handle],
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * MIB),
    }
    return SimpleNamespace(**{**calls, **changes})


def fails(*_: object) -> Any:
    raise RuntimeError("NVML: GPU is lost")


@pytest.mark.parametrize(
    ("cpu_max", "limit"),
    [
        ("50000 100000", 0.5),
        ("25000 50000\n", 0.5),
        ("max 100000", math.inf),
        ("", math.inf),
        ("garbage", math.inf),
        ("1 2 3", math.inf),
    ],
)
def test_quota_of_the_container_counts(
    cgroup: Path, cpu_max: str, limit: float
) -> None:
    whole = this_node().cpus
    (cgroup / "cpu.max").write_text(cpu_max)
    assert this_node().cpus == min(whole, limit)


@pytest.mark.parametrize(
    ("memory_max", "limit"),
    [(f"{5 * MIB}\n", 5 * MIB), ("max\n", 2**63), ("", 2**63), ("1.5", 2**63)],
)
def test_memory_of_the_container_counts(
    cgroup: Path, memory_max: str, limit: int
) -> None:
    (cgroup / "memory.max").write_text(memory_max)
    assert this_node().memory_bytes == min(psutil.virtual_memory().total, limit)


@pytest.mark.parametrize(
    ("has_nodes", "memory_max", "wanted"),
    [(True, "max", 48 * MIB), (True, f"{5 * MIB}", 5 * MIB), (False, "max", None)],
)
def test_memory_of_the_numa_node(
    cgroup: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_nodes: bool,
    memory_max: str,
    wanted: int | None,
) -> None:
    core = tmp_path / "cpu" / f"cpu{min(os.sched_getaffinity(0))}"
    node = tmp_path / "node" / "node1"
    for folder in (core, node):
        folder.mkdir(parents=True)
    lines = f"Node 1 MemTotal:  {48 * 1024} kB\nNode 1 MemFree: 7 kB\n"
    (node / "meminfo").write_text(lines)
    if has_nodes:
        (core / "node1").mkdir()
    (cgroup / "memory.max").write_text(memory_max)
    monkeypatch.setattr(inventory, "DEVICES", tmp_path)
    assert numa_node_bytes() == (wanted or psutil.virtual_memory().total)


def test_declared_limits_only_reduce() -> None:
    whole = this_node()
    more = this_node(cpus=whole.cpus * 2, memory_bytes=whole.memory_bytes * 2)
    assert (more.cpus, more.memory_bytes) == (whole.cpus, whole.memory_bytes)
    less = this_node("small", cpus=0.25, memory_bytes=MIB)
    assert (less.name, less.key) == ("small", "small")
    assert (less.cpus, less.memory_bytes) == (0.25, MIB)


def test_gpus_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old versions of the library return names as bytes."""
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    assert gpus() == (Gpu(0, "A100", 80 * MIB), Gpu(1, "H200", 80 * MIB))
    assert this_node().gpus == gpus()


def test_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus() == ()
    monkeypatch.setitem(sys.modules, "pynvml", driver(nvmlInit=fails))
    assert gpus() == ()


def test_library_is_shut_down_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    broken = driver(nvmlDeviceGetCount=fails, nvmlShutdown=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    with pytest.raises(RuntimeError):
        gpus()
    assert ended == [True]


def test_lost_gpu_does_not_hide_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        return fails() if index == 0 else index

    broken = driver(nvmlDeviceGetHandleByIndex=handle)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert [gpu.index for gpu in this_node().gpus] == [1]


@pytest.mark.parametrize(
    ("variable", "kinds"),
    [
        (None, ["A100", "H200"]),
        ("1", ["H200"]),
        ("1, 0", ["H200", "A100"]),
        ("GPU-1", ["H200"]),
        ("", []),
    ],
)
def test_only_visible_gpus_are_there(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, kinds: list[str]
) -> None:
    """Their indexes are torch's: positions in ``CUDA_VISIBLE_DEVICES``."""
    by_uuid = driver(nvmlDeviceGetHandleByUUID=lambda uuid: int(uuid[-1]))
    monkeypatch.setitem(sys.modules, "pynvml", by_uuid)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    found = this_node().gpus
    assert [gpu.kind for gpu in found] == kinds
    assert [gpu.index for gpu in found] == list(range(len(kinds)))
