"""Duration of a service's start, by phase, for people."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from multiworld.serve.controller.fleet.state import Process, ProcessPhase


class Startup:
    """The start of a service; all times are in seconds on `clock`."""

    def __init__(
        self,
        began: float,
        clock: Callable[[], float] = time.monotonic,
        on_phase: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._clock, self._began, self._on_phase = clock, began, on_phase
        self._phases: list[tuple[str, float]] = []
        self._entered = began

    def end(self, phase: str, at: float | None = None) -> None:
        """End a phase, named like "to start the store", at ``at`` or now."""
        now = self._clock() if at is None else max(at, self._entered)
        self._phases.append((phase, now - self._entered))
        self._on_phase(f"{now - self._entered:.1f} s {phase}")
        self._entered = now

    def end_ready(self, processes: Iterable[Process]) -> None:
        joined = [
            p.entered[ProcessPhase.JOINED]
            for p in processes
            if ProcessPhase.JOINED in p.entered
        ]
        if joined:
            self.end("until a process ran, with the modules imported", min(joined))
        self.end("to load and probe the replicas")

    def __str__(self) -> str:
        phases = ", ".join(f"{took_s:.1f} s {phase}" for phase, took_s in self._phases)
        return f"{self._entered - self._began:.1f} s ({phases})"


def process_began(clock: Callable[[], float] = time.monotonic) -> float:
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return clock() - (up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
