"""Resource usage of a process, from Linux's ``/proc``."""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KIB = 1024
# Clock ticks per second; ``/proc`` counts CPU time in them.
TICKS = os.sysconf("SC_CLK_TCK")
MEMORY_S = 10.0  # minimum seconds between two reads of memory by a ``UsageReader``


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds since the processes started, and memory as in ``memory_of``."""

    cpu_s: float
    memory_bytes: int


def disk_of(folder: Path) -> tuple[int, int]:
    """Return free and total bytes of a folder's file system; zeros if unknown."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0, 0
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process of this machine."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"  # proc(5)


def usage_of(pid: int) -> Usage:
    """Return the usage of a process and its descendants; zeros if it has exited."""
    family = family_of(pid)
    return Usage(sum(map(_cpu_s, family)), sum(map(_memory, family)))


def own_cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, also exited ones."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(map(_cpu_s, family_of(os.getpid())[1:]))
    return time.process_time() + living + ended.ru_utime + ended.ru_stime


class UsageReader:
    """Reads the usage of a process and its descendants repeatedly.

    It reads memory at most every ``MEMORY_S``, because the kernel needs milliseconds to
    tell shared memory from other memory.
    """

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._clock = pid, clock
        self._latest, self._due_at = Usage(0.0, 0), -math.inf

    def read(self) -> Usage:
        now = self._clock()
        if now >= self._due_at:
            self._latest, self._due_at = usage_of(self._pid), now + MEMORY_S
            return self._latest
        cpu_s = sum(map(_cpu_s, family_of(self._pid)))
        return Usage(cpu_s, self._latest.memory_bytes)


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process and its descendants occupy."""
    # Memory that is shared after a fork counts proportionally. File pages, such as
    # mapped weights, do not count: the kernel drops them when memory is short.
    return sum(map(_memory, family_of(pid)))


def memory_above(pid: int, limit: int) -> int | None:
    """Return the memory of a process and its descendants if it exceeds ``limit``."""
    family = family_of(pid)
    if sum(map(_resident, family)) <= limit:
        return None
    used = sum(map(_memory, family))
    return used if used > limit else None


def family_of(pid: int) -> list[int]:
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                text = Path(f"/proc/{one}/task/{task}/children").read_text()
                left += map(int, text.split())
        except OSError:
            pass  # the process is exiting, or the kernel does not report children
    return found


def _fields(path: str, *names: str) -> int | None:
    """Return the sum, in bytes, of named lines of a file, such as ``Name: 12 kB``."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = [
        int(line.split()[1]) for line in lines if line.partition(":")[0] in set(names)
    ]
    return sum(found) * KIB if found else None


def _resident(pid: int) -> int:
    return _fields(f"/proc/{pid}/status", "RssAnon", "RssShmem") or 0


def _memory(pid: int) -> int:
    exact = _fields(f"/proc/{pid}/smaps_rollup", "Pss_Anon", "Pss_Shmem")
    return _resident(pid) if exact is None else exact


def _cpu_s(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class MemoryKills:
    """Detects kills by the kernel for lack of memory.

    It reads the host-wide count, which includes kills at a container's limit.
    """

    def __init__(self, count: Callable[[], int] | None = None) -> None:
        self._count = count or _memory_kills
        self._known = self._count()

    def grew(self) -> bool:
        """Return whether the count has grown since the last call."""
        before, self._known = self._known, self._count()
        return self._known > before


def _memory_kills() -> int:
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    found = (line.partition(" ") for line in lines)
    return next((int(count) for name, _, count in found if name == "oom_kill"), 0)
