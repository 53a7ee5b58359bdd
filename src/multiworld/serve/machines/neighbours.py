"""The processes of other programs that use a machine's cores."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Container

import psutil

LOOK_S = 5.0  # minimum seconds between two scans; each takes milliseconds
SHOWN = 3  # maximum number of process ids that are named
LITTLE = 0.2  # cores below which a program is not named


class Neighbours:
    """Finds the program outside a service that uses the most cores."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = -math.inf
        # CPU seconds at the last scan, by process id and start time.
        self._used: dict[tuple[int, float], float] = {}
        self._most = ""

    def most(self, own: Container[int]) -> str:
        """Return the program with most CPU time since the last scan, in words.

        Processes of one name count together; those in ``own`` and their descendants do
        not count. Empty: there is none, or this is the first scan.
        """
        now = self._clock()
        took_s = now - self._looked_at
        if took_s < LOOK_S:
            return self._most
        before, self._used, self._looked_at = self._used, {}, now
        parents: dict[int, int] = {}
        cores: dict[tuple[str, int], float] = {}  # by name and id
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error), process.oneshot():
                key = process.pid, process.create_time()
                times = process.cpu_times()
                parents[process.pid] = process.ppid()
                self._used[key] = times.user + times.system
                used_s = self._used[key] - before.get(key, self._used[key])
                if used_s > 0:
                    cores[process.name(), process.pid] = used_s / took_s
        programs: dict[str, list[tuple[float, int]]] = {}
        for (name, pid), used in cores.items():
            if not _is_of(pid, own, parents):
                programs.setdefault(name, []).append((used, pid))
        self._most = max(map(_words, programs.items()), default=(0.0, ""))[1]
        return self._most


def _words(program: tuple[str, list[tuple[float, int]]]) -> tuple[float, str]:
    """Return a program's cores, and its busiest processes in words."""
    name, found = program
    used = sum(each for each, _ in found)
    shown = [f"{pid}: {each:.1f}" for each, pid in sorted(found, reverse=True)[:SHOWN]]
    more = " and more" * (len(found) > SHOWN)
    words = f"{name} with {used:.1f} (process {', '.join(shown)}{more})"
    return used, words if used >= LITTLE else ""


def _is_of(pid: int, own: Container[int], parents: dict[int, int]) -> bool:
    while pid:
        if pid in own:
            return True
        pid = parents.get(pid, 0)
    return False
