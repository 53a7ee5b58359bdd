"""Ray actor that runs one rank of a replica. Shell."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

LINGER_S = 5.0
"""Seconds that the actor stays after ``run``, so that its exit code can be read."""


class ReplicaActor:
    """One rank of a replica. Its method ``run`` returns when the replica exits."""

    def hello(self) -> tuple[int, int]:
        """Return this process's id, and its start time in the kernel's ticks."""
        stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        return os.getpid(), int(stat[19])

    def run(self, args: str, env: dict[str, str], folder: str, log: str) -> int:
        """Run the process that ``args`` describe; return its exit code.

        Args:
            args: Its ``ProcessArgs`` as JSON.
            env: Variables added to its environment. They are not in the actor's
                options, because Ray shows those to all users of the cluster.
            folder: Folder in which the service was started; modules may be imported
                from it.
            log: File for the output, if its folder exists on this machine.
        """
        os.environ.update(env)
        if Path(folder).is_dir() and folder not in sys.path:
            sys.path.insert(0, folder)
        if Path(log).parent.is_dir():
            opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(opened, 1)
            os.dup2(opened, 2)
            os.close(opened)
        from multiworld.serve.launchers.entry import main

        code = main(args)
        # The bridge ends the actor when it gets the code. If the head is lost just now
        # it cannot, and an idle process would remain.
        timer = threading.Timer(LINGER_S, os._exit, [code])
        timer.daemon = True
        timer.start()
        return code

    def ended(self) -> None:
        """Return when ``run`` has returned, because actor calls run one by one."""


def probe_gpus() -> list[tuple[int, str, int]]:
    """Return the GPUs of the machine where this runs."""
    from multiworld.serve.resources.inventory import gpus

    return [(gpu.index, gpu.kind, gpu.memory_bytes) for gpu in gpus()]
