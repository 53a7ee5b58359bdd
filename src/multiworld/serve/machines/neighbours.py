"""The processes of other programs that use a machine's cores."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Container

import psutil

LOOK_S = 5.0  # minimum seconds between two looks, which take milliseconds
LITTLE = 0.2  # cores below which a process is not named


class Neighbours:
    """Finds the process outside a service that uses the most cores."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = -math.inf
        # By id and start: CPU seconds at the last look.
        self._used: dict[tuple[int, float], float] = {}
        self._most = ""

    def most(self, own: Container[int]) -> str:
        """Return name, id and cores of the process that used most since the last look.

        Processes in ``own`` and their descendants do not count. Empty: there is none,
        or this is the first look.
        """
        now = self._clock()
        took_s = now - self._looked_at
        if took_s < LOOK_S:
            return self._most
        before, self._used, self._looked_at = self._used, {}, now
        parents: dict[int, int] = {}
        cores: dict[psutil.Process, float] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error), process.oneshot():
                key = process.pid, process.create_time()
                times = process.cpu_times()
                parents[process.pid] = process.ppid()
                self._used[key] = times.user + times.system
                if key in before:
                    cores[process] = (self._used[key] - before[key]) / took_s
        others = {p: n for p, n in cores.items() if not _is_of(p.pid, own, parents)}
        self._most = ""
        if others:
            most = max(others, key=lambda process: others[process])
            with contextlib.suppress(psutil.Error):
                if others[most] >= LITTLE:
                    who = f"{most.name()} (process {most.pid})"
                    self._most = f"{who} with {others[most]:.1f}"
        return self._most


def _is_of(pid: int, own: Container[int], parents: dict[int, int]) -> bool:
    while pid:
        if pid in own:
            return True
        pid = parents.get(pid, 0)
    return False
