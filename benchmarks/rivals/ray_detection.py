"""Time until Ray reports that an actor's process was killed or stopped. Needs ``ray``.

``detection.py --ray PYTHON`` runs this script with that interpreter. It prints JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import ray

GIVE_UP_S = 5.0
"""Seconds after which a fault counts as not detected."""


@ray.remote(max_restarts=0)
class Actor:
    """Actor with a call that does not return."""

    def pid(self) -> int:
        return os.getpid()

    def block(self) -> None:
        time.sleep(3600)


def measure(number: int) -> tuple[float | None, float]:
    """Send a signal to an actor; return milliseconds to detection and to recovery."""
    # Recovery means that a new actor has answered.
    actor = Actor.remote()
    pid = ray.get(actor.pid.remote())
    call = actor.block.remote()
    time.sleep(0.3)
    begin = time.monotonic()
    os.kill(pid, number)
    done, _ = ray.wait([call], timeout=GIVE_UP_S)
    noticed = (time.monotonic() - begin) * 1000 if done else None
    ray.get(Actor.remote().pid.remote())
    recovered = (time.monotonic() - begin) * 1000
    if number == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    return noticed, recovered


def main() -> None:
    """Measure; the argument is the number of rounds."""
    rounds = int(sys.argv[1])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    rows = []
    for fault, number, times in (
        ("killed, survivor in recv", signal.SIGKILL, rounds),
        ("stopped (SIGSTOP)", signal.SIGSTOP, min(3, rounds)),
    ):
        found = [measure(number) for _ in range(times)]
        detected = [noticed for noticed, _ in found]
        row = {"fault": fault, "detected_ms": detected, "recovered_ms": []}
        if number == signal.SIGKILL:
            row["recovered_ms"] = [recovered for _, recovered in found]
        rows.append(row)
    ray.shutdown()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
