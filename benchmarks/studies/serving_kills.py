"""Cost of killed replicas: lost requests, and the longest latency.

``python -m benchmarks.studies.serving_kills [--ray PYTHON] [--rounds 3]``. Three
stages of 50 ms, with two replicas each, run on multiworld and on Ray Serve with its
defaults, one after the other in each round. Eight clients send requests in a closed
loop for 15 s and wait up to 10 s for an answer. A replica of the first, second and
third stage is killed (SIGKILL) after 3, 6 and 9 s. Prints the number of requests that
were not answered with 200, and the longest latency. Writes ``serving_kills.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.serving import services
from benchmarks.serving.services import Service

CLIENTS, SECONDS, PATIENCE_S = 8, 15.0, 10.0
KILLS_S = (3.0, 6.0, 9.0)
"""Seconds after which a replica of the first, second and third stage is killed."""


def ours(folder: Path) -> Callable[[int], int]:
    """Return a function that chooses a multiworld replica of a stage, by PID."""

    def find(stage: int) -> int:
        record = json.loads((folder / "state" / "record.json").read_text())
        found = [
            p["pid"]
            for p in record["processes"]
            if p["name"].startswith("slow/") and f"/{stage}/" in p["name"]
        ]
        return int(random.choice(found))

    return find


def rays(stage: int) -> int:
    """Return the PID of a random Ray Serve replica of a stage, by its process name."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f"ServeReplica:default:slow{stage}".encode() in text:
                found.append(int(folder.name))
    return random.choice(found)


async def disturb(contender: Service, find: Callable[[int], int]) -> dict[str, Any]:
    """Send requests while replicas are killed; return the results."""
    # ``find`` returns the PID of a replica of a stage.
    failed: Counter[str] = Counter()
    latencies: list[float] = []
    end = time.monotonic() + SECONDS

    async def client() -> None:
        while (begin := time.monotonic()) < end:
            try:
                async with http.post(contender.url, json=contender.body) as response:
                    await response.read()
                    if response.status == 200:
                        latencies.append(time.monotonic() - begin)
                    else:
                        failed[str(response.status)] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                failed[type(error).__name__] += 1

    async def kill() -> None:
        for stage, after_s in enumerate(KILLS_S):
            await asyncio.sleep(end - SECONDS + after_s - time.monotonic())
            os.kill(find(stage), signal.SIGKILL)

    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await asyncio.gather(kill(), *(client() for _ in range(CLIENTS)))
    ordered = sorted(latencies)
    return {
        "sent": len(ordered) + sum(failed.values()),
        "lost": sum(failed.values()),
        "failed": dict(failed),
        "p50_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[int(len(ordered) * 0.99)],
        "longest_ms": 1000 * ordered[-1],
    }


def one_round(python: str | None) -> dict[str, dict[str, Any]]:
    """Measure each system once."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with services.ours(folder, services.SLOW, replicas=2) as served:
            found["multiworld"] = asyncio.run(disturb(served[0], ours(folder)))
        if python is not None:
            with services.rays(python, services.SLOW, folder, replicas=2) as service:
                found["Ray Serve"] = asyncio.run(disturb(service, rays))
    return found


def main() -> None:
    """Measure all rounds, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__ or "")
    parser.add_argument("--ray", help="an interpreter that has ray[serve]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("serving_kills.json"))
    given = parser.parse_args()
    rounds = []
    for number in range(given.rounds):
        rounds.append(one_round(given.ray))
        print(f"{number + 1}/{given.rounds} {rounds[-1]}", flush=True)
    table = Table(title=f"{len(KILLS_S)} replicas killed in {SECONDS:g} s")
    for column in ("", "sent", "lost", "p50 ms", "p99 ms", "longest ms"):
        table.add_column(column)
    for system in rounds[0]:
        for found in (r[system] for r in rounds):
            numbers = (found[k] for k in ("p50_ms", "p99_ms", "longest_ms"))
            table.add_row(
                system,
                str(found["sent"]),
                str(found["lost"]),
                *(f"{number:.0f}" for number in numbers),
            )
    Console().print(table)
    what = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "rounds": rounds,
    }
    given.out.write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
