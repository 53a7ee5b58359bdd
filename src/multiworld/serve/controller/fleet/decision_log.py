"""Log of a service's decisions, with the snapshots they are based on."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from multiworld.net.rare_log import RareLog
from multiworld.serve.controller.fleet.entries import Assessment, Decision

logger = logging.getLogger("multiworld.serve")
rare_log = RareLog(logger)

KEPT = 200  # number of decisions in memory
KEPT_SNAPSHOTS = 20  # number of snapshots in memory; one may have thousands of samples
# Maximum number of decisions that wait to be written; further ones are not written.
WAITING = 100
FORMAT = 1  # format of a line
FILE_BYTES = 8 * 2**20  # size at which the file is rotated; one old file is kept


# Returns a decision's snapshot. It is called when the snapshot is written or requested,
# because converting it to plain data takes long.
Snapshot = Callable[[], dict[str, Any]]


class _Lines:
    """Appends lines to a file in a thread: a disk that hangs blocks nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: queue.Queue[tuple[Decision, Snapshot]] = queue.Queue(WAITING)
        threading.Thread(
            target=self._run, name="multiworld decisions", daemon=True
        ).start()

    def put(self, decision: Decision, snapshot: Snapshot) -> None:
        try:
            self._waiting.put_nowait((decision, snapshot))
        except queue.Full:
            error = OSError(f"{self._path}: writing to the disk takes too long")
            rare_log.error("cannot write the decision log", error)

    def settle(self, limit_s: float) -> None:
        done = self._waiting.all_tasks_done
        with done:
            done.wait_for(lambda: not self._waiting.unfinished_tasks, limit_s)

    def _run(self) -> None:
        while True:
            decision, snapshot = self._waiting.get()
            try:
                self._append(_line_of(replace(decision, snapshot=snapshot())))
            except Exception as error:
                # The disk may be full, or the facts of a user's policy may not be
                # encodable.
                rare_log.error("cannot write the decision log", error)
            self._waiting.task_done()

    def _append(self, line: str) -> None:
        if self._path.exists() and self._path.stat().st_size > FILE_BYTES:
            self._path.replace(self._path.with_suffix(".old.jsonl"))
        with open(self._path, "a") as file:
            file.write(line)


class DecisionLog:
    """Log of decisions with an effect (JSON lines at `path`), and the last reasons."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lines: _Lines | None = None
        self._decided: deque[tuple[Decision, Snapshot]] = deque(maxlen=KEPT)
        self._number = 0
        self._reasons: dict[tuple[str, str], Assessment] = {}

    def record(
        self,
        kind: str,
        about: str,
        what: str,
        facts: dict[str, Any],
        snapshot: Snapshot,
    ) -> None:
        """Record a decision that changes something."""
        self._number += 1
        decision = Decision(self._number, time.time(), kind, about, what, facts)
        self._decided.append((decision, snapshot))
        if len(self._decided) > KEPT_SNAPSHOTS:
            old, _ = self._decided[-KEPT_SNAPSHOTS - 1]
            self._decided[-KEPT_SNAPSHOTS - 1] = old, dict
        self.set_reason(kind, about, what)
        if self._path is not None:
            self._lines = self._lines or _Lines(self._path)
            self._lines.put(decision, snapshot)

    def set_reason(self, kind: str, about: str, what: str) -> None:
        """Set the latest reason, whether or not the decision changes anything."""
        self._reasons[kind, about] = Assessment(kind, about, time.time(), what)

    def last(self, count: int, *, with_snapshots: bool = False) -> list[Decision]:
        found = list(self._decided)[max(0, len(self._decided) - count) :]
        if not with_snapshots:
            return [decision for decision, _ in found]
        return [replace(decision, snapshot=snapshot()) for decision, snapshot in found]

    def reasons(self) -> list[Assessment]:
        return list(self._reasons.values())

    def settle(self, limit_s: float) -> None:
        """Wait until all decisions are in the file, at most ``limit_s``."""
        if self._lines is not None:
            self._lines.settle(limit_s)


def _line_of(decision: Decision) -> str:
    entry = {"format": FORMAT, **asdict(decision)}
    return json.dumps(entry, default=str, skipkeys=True) + "\n"
