"""Leak checks: threads, descriptors, tasks and child processes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

SETTLE_S = 5.0
"""Seconds that resources may take to close before they count as leaked."""


@dataclass(frozen=True, slots=True)
class Leak:
    """Snapshot of the resources that a process has open.

    Attributes:
        threads: Names of threads, by ID and start (jiffies since boot). Native threads
            without a name of their own (OpenMP's) have an empty name and are not
            reported: they live as long as the thread that started them.
        descriptors: Targets of open descriptors, by number.
        tasks: Names of the running loop's tasks.
        children: Process IDs of child processes.
    """

    threads: dict[tuple[int, int], str]
    descriptors: dict[int, str]
    tasks: frozenset[str]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Leak:
        """Return a snapshot of this process."""
        return cls(_threads(), _descriptors(), _tasks(), _children())

    def since(self, before: Leak) -> list[str]:
        """Return a line of text for each resource that was not open earlier.

        Args:
            before: The earlier snapshot of the same process.
        """
        new = [
            f"thread {key[0]} ({name})"
            for key, name in self.threads.items()
            if name and key not in before.threads
        ]
        new += [
            f"descriptor {fd}: {what}"
            for fd, what in self.descriptors.items()
            if before.descriptors.get(fd) != what
        ]
        new += [f"task {name}" for name in self.tasks - before.tasks]
        new += [f"child process {pid}" for pid in self.children - before.children]
        return sorted(new)


class LeakError(AssertionError):
    """Resources are still open after a block that should have closed them."""


def _threads() -> dict[tuple[int, int], str]:
    names = {t.native_id: t.name for t in threading.enumerate()}
    process = Path("/proc/self/comm").read_text().strip()
    found = {}
    for tid in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):  # the thread has ended
            stat = Path(f"/proc/self/task/{tid}/stat").read_text()
            name, _, rest = stat.partition("(")[2].rpartition(")")
            started = int(rest.split()[19])  # field 22 of proc_pid_stat(5)
            # A native thread has its process's name unless it sets one of its own.
            own = "" if name == process else f"native {name}"
            found[tid, started] = names.get(tid, own)
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: what for fd, what in found.items() if not what.startswith("/proc/")}


def _tasks() -> frozenset[str]:
    try:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
    except RuntimeError:
        return frozenset()
    return frozenset(f"{task.get_name()} {id(task)}" for task in tasks)


def _children() -> frozenset[int]:
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):  # one file per thread
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, file.read_text().split()))
    return frozenset(found)


@contextlib.asynccontextmanager
async def no_leaks(*, allow: tuple[str, ...] = ()) -> AsyncIterator[None]:
    """Yield to a block, then raise ``LeakError`` if it left new resources open.

    Resources have ``SETTLE_S`` to close. If the block raises an error, the check is
    skipped.

    Args:
        allow: Substrings of resources that may stay open, such as "asyncio_" for the
            threads of the loop's own pool.
    """
    gc.collect()
    before = Leak.now()
    yield
    loop = asyncio.get_running_loop()
    end = loop.time() + SETTLE_S
    while True:
        gc.collect()
        new = Leak.now().since(before)
        new = [what for what in new if not any(word in what for word in allow)]
        if not new:
            return
        if loop.time() > end:
            raise LeakError("still open after the block: " + "; ".join(new))
        await asyncio.sleep(0.02)
