"""The actor of Ray that runs one rank of a replica. Shell."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

LINGER_S = 5.0
"""For how long a process outlives what it ran, to tell of its end."""


class ReplicaActor:
    """One rank. Its ``run`` takes as long as the replica lives."""

    def hello(self) -> tuple[int, int]:
        """Return this process's id, and when it began in the kernel's ticks."""
        stat = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        return os.getpid(), int(stat[19])

    def run(self, args: str, env: dict[str, str], folder: str, log: str) -> int:
        """Run the process that ``args`` describe; return its exit code.

        Args:
            args: Its ``ProcessArgs`` as JSON.
            env: What it finds in its environment. Not in the actor's own options: they
                are shown to everybody who sees the cluster.
            folder: Where the service was started; what is imported may lie there.
            log: Where the output goes, if its folder is on this machine.
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
        # The bridge ends the actor when it hears of this; a head that is lost just now
        # would leave an idle process behind.
        timer = threading.Timer(LINGER_S, os._exit, [code])
        timer.daemon = True
        timer.start()
        return code

    def ended(self) -> None:
        """Return when ``run`` has ended: calls of an actor come one after the other."""


def probe_gpus() -> list[tuple[int, str, int]]:
    """Return the GPUs of the machine where this runs."""
    from multiworld.serve.resources.inventory import gpus

    return [(gpu.index, gpu.kind, gpu.memory_bytes) for gpu in gpus()]
