"""Inventory of this machine: cores, memory and GPUs."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from multiworld.serve.machines.amounts import Gpu, Node

CGROUP = Path("/sys/fs/cgroup")  # limits of this container (cgroup v2)
DEVICES = Path("/sys/devices/system")  # the machine's cores and NUMA nodes

logger = logging.getLogger("multiworld.serve")


def this_node(
    name: str = "", cpus: float | None = None, memory_bytes: int | None = None
) -> Node:
    """Return the resources of this machine that this process may use."""
    has_cpus = min(float(len(os.sched_getaffinity(0))), _quota(CGROUP / "cpu.max"))
    has_bytes = min(psutil.virtual_memory().total, _limit(CGROUP / "memory.max"))
    return Node(
        name or socket.gethostname(),
        min(has_cpus, cpus or has_cpus),
        min(has_bytes, memory_bytes or has_bytes),
        gpus(visible_gpus()),
        key=name or socket.gethostname(),
    )


def numa_node_bytes() -> int:
    """Return the memory of the NUMA node of the first core that this process may use.

    At most the container's limit; all memory if the kernel reports no NUMA nodes.
    """
    found: int = psutil.virtual_memory().total
    core = DEVICES / "cpu" / f"cpu{min(os.sched_getaffinity(0))}"
    for node in core.glob("node[0-9]*"):
        text = DEVICES / "node" / node.name / "meminfo"
        # Lines as "Node 0 MemTotal:  15952088 kB".
        for words in map(str.split, text.read_text().splitlines()):
            if words[2:3] == ["MemTotal:"]:
                found = int(words[3]) * 1024
    return min(found, _limit(CGROUP / "memory.max"))


def visible_gpus() -> list[str] | None:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, as named there; None: all."""
    # A GPU's index, in torch and in ``Gpu``, is its position in this list.
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if names is None else [n.strip() for n in names.split(",") if n.strip()]


def gpus(visible: Sequence[str] | None = None) -> tuple[Gpu, ...]:
    """Return the GPUs that NVML reports; ``visible``: indexes or UUIDs; None: all."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # there may be no library, no driver, or no permission
        return ()
    try:
        if visible is None:
            visible = [str(n) for n in range(pynvml.nvmlDeviceGetCount())]
        found = [_gpu(pynvml, index, name) for index, name in enumerate(visible)]
        return tuple(gpu for gpu in found if gpu is not None)
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int, name: str) -> Gpu | None:
    """Return a GPU, or None if the driver reports an error for it."""
    try:
        if name.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        model = pynvml.nvmlDeviceGetName(handle)
        memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except Exception as error:  # e.g. the GPU has fallen off the bus
        logger.warning("GPU %s is not usable: %s", name, error)
        return None
    kind = model.decode() if isinstance(model, bytes) else str(model)
    return Gpu(index, kind, memory_bytes)


def _limit(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # there is no cgroup, or its limit is "max"
        return 2**63


def _quota(path: Path) -> float:
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):
        return float("inf")
