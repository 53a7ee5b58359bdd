"""Sizes of the processes of a service, and their growth."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.serve.harness import Served

GROWTH_BYTES = 48 * 2**20
GROWTH_FILES = 24
"""Descriptors that a process may have gained: caches, connections and links vary."""


@dataclass(slots=True)
class Size:
    rss_bytes: int
    files: int


def size_of(pid: int) -> Size:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Size(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))


def sizes_of(service: Served, *, replicas: bool = False) -> dict[str, Size]:
    """Return the sizes of long-lived processes by name, those of replicas if wanted."""
    status = service.status()
    pids = {
        p.name: p.pid for p in status.processes if p.pid and (p.is_gateway or replicas)
    }
    pids["controller"] = status.controller
    if keeper := service.keeper():
        pids["keeper"] = keeper
    return {name: size_of(pid) for name, pid in pids.items()}


def grown(before: Mapping[str, Size], after: Mapping[str, Size]) -> list[str]:
    """Return the names of the processes that have grown, or are gone."""
    return [
        name
        for name, size in before.items()
        if name not in after
        or after[name].rss_bytes - size.rss_bytes > GROWTH_BYTES
        or after[name].files - size.files > GROWTH_FILES
    ]
