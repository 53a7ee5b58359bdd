"""What this machine has. Shell."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil

from multiworld.serve.resources.amounts import Gpu, Node

CGROUP = Path("/sys/fs/cgroup")


def this_node(
    name: str = "", cpus: float | None = None, memory_bytes: int | None = None
) -> Node:
    """Return what this process may use of its machine.

    That is what the machine has, its container's limits and its own CPU affinity,
    whichever is least.

    Args:
        name: By default the host's name.
        cpus: A lower limit on cores, as somebody has declared it.
        memory_bytes: The same for memory.
    """
    has_cpus = min(float(len(os.sched_getaffinity(0))), _quota(CGROUP / "cpu.max"))
    has_bytes = min(psutil.virtual_memory().total, _limit(CGROUP / "memory.max"))
    return Node(
        name or socket.gethostname(),
        min(has_cpus, cpus or has_cpus),
        min(has_bytes, memory_bytes or has_bytes),
        gpus(),
        key=name or socket.gethostname(),
    )


def gpus() -> tuple[Gpu, ...]:
    """Return NVIDIA's devices, as its management library tells them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, or no right to ask
        return ()
    try:
        return tuple(_gpu(pynvml, n) for n in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name = pynvml.nvmlDeviceGetName(handle)
    kind = name.decode() if isinstance(name, bytes) else str(name)
    return Gpu(index, kind, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))


def _limit(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return 2**63


def _quota(path: Path) -> float:
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")
