"""Effect of one tenant's poison requests on the latency of another tenant.

``python -m benchmarks.studies.crashes [--rounds 2] [--seconds 120]``. The model
has two stages that take 10 and 30 ms for a row, with two replicas each. The quiet
tenant sends six requests per second. The deadly tenant sends nothing, or one poison
request per second, each different, which kills the replica that computes it. The killed
replicas belong to the deadly tenant (``dedicated``) or are shared. Writes
``crashes.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.serving import services
from multiworld.serve.controller.answers import TenantWithKey
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.load.generator import Load, Target
from multiworld.serve.load.summary import quantile
from multiworld.serve.simulation.traces import gamma

QUIET, DEADLY = 6.0, 1.0
"""Requests per second of the two tenants."""

ALONE, OWN, SHARED = (
    "nobody crashes anything",
    "another crashes replicas of its own",
    "another crashes those of both",
)


def body(x: float) -> bytes:
    data = {"name": "x", "datatype": "FP32", "shape": [1], "data": [x]}
    return orjson.dumps({"inputs": [data]})


def spec_of(kind: str) -> dict[str, Any]:
    """Return the spec of a case."""
    model: dict[str, Any] = {
        "factory": "benchmarks.serving.paced:model",
        "options": {"is_mortal": True},
        "stages": [{"max_batch_size": 4, "replicas": 2}] * 2,
    }
    if kind == OWN:
        model["dedicated"] = ["deadly"]
    return {
        "app": "crashes",
        "models": {"m": model},
        "gateway": {"port": 0, "authentication": "keys"},
    }


async def measure(url: str, service: Service, kind: str, seconds: float) -> Any:
    """Send the requests of both tenants; return the samples of each."""

    def load(name: str, rate: float, numbers: range, seed: int) -> Load:
        key = service.ask("POST", "/tenants", TenantWithKey, json={"name": name}).key
        bodies = [body(float(n)) for n in numbers]
        target = Target(f"{url}/v2/models/m/infer", bodies, {"X-API-Key": key})
        due = [arrival.at for arrival in gamma(rate, seconds, seed=seed)]
        return Load(target, rate, due=due)

    # Deadly requests all differ, because a repeated poison request is refused at once.
    loads = [
        load("quiet", QUIET, range(1, 2), 1),
        load("deadly", DEADLY, range(-5000, -1), 2),
    ]
    await asyncio.gather(*(one.run() for one in loads[: 1 + (kind != ALONE)]))
    return [one.samples for one in loads]


def run(kind: str, seconds: float) -> dict[str, float]:
    """Run one case, and return the quiet tenant's results."""
    with (
        tempfile.TemporaryDirectory() as folder,
        services.running(spec_of(kind), Path(folder)) as url,
    ):
        service = Service(None, Path(folder) / "state")
        quiet, deadly = asyncio.run(measure(url, service, kind, seconds))
        events = service.ask("GET", "/events", list[HistoryEntry])
    took = [s.latency_s for s in quiet if s.is_answered]
    return {
        "sent": len(quiet),
        "refused": sum(not s.is_answered for s in quiet),
        "p50": quantile(took, 0.5),
        "p99": quantile(took, 0.99),
        "most": max(took),
        "killed": sum(event.kind == "lost" for event in events),
        "quarantined": sum(s.status == 429 for s in deadly),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, print a table, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("crashes.json"))
    given = parser.parse_args(arguments)
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for kind in (ALONE, OWN, SHARED):
            found = run(kind, given.seconds)
            results.setdefault(kind, []).append(found)
            Console().print(kind, found)
    table = Table(title="the quiet tenant, medians of the rounds")
    table.add_column("case")
    for title in ("sent", "not answered", "p50 ms", "p99 ms", "most ms", "killed"):
        table.add_column(title, justify="right")
    for kind, rounds in results.items():
        mid = {name: median(r[name] for r in rounds) for name in rounds[0]}
        table.add_row(
            kind,
            f"{mid['sent']:.0f}",
            f"{mid['refused']:.0f}",
            *(f"{mid[name] * 1000:.0f}" for name in ("p50", "p99", "most")),
            f"{mid['killed']:.0f}",
        )
    Console().print(table)
    report = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "seconds": given.seconds,
        "results": results,
    }
    path = given.out
    path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
