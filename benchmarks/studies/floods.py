"""Effect of one tenant's flood on the latency of another tenant.

``python -m benchmarks.studies.floods [--rounds 3] [--seconds 15]``. The model has
two stages that take 10 and 30 ms for a row, with one replica each. The quiet tenant
sends six requests per second. The flood is another tenant that sends ten times what the
model can compute. The cases:

- no flood,
- fair queueing, the default,
- both loads as one tenant, which results in a plain queue,
- a limit on the flood (``max_parallel_requests``),
- dedicated replicas for the quiet tenant.

Writes ``floods.json``.
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
from multiworld.serve.load.generator import Load, Target
from multiworld.serve.load.summary import quantile
from multiworld.serve.simulation.traces import gamma

MS = (10.0, 30.0)
"""Milliseconds that each stage takes for a row."""

QUIET, FLOOD = 6.0, 330.0
"""Requests per second of the two tenants."""

BODY = orjson.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
)
ALONE, FAIR, PLAIN, LIMITED, OWN = (
    "no flood",
    "fair shares",
    "one queue for both",
    "flood limited to 8 at a time",
    "replicas of its own",
)


def spec_of(kind: str) -> dict[str, Any]:
    """Return the spec of a case."""
    stages = [
        {"max_batch_size": 4, "max_ongoing_requests": 8, "item_ms": ms} for ms in MS
    ]
    model: dict[str, Any] = {
        "factory": "benchmarks.serving.paced:model",
        "stages": stages,
        "max_queued_requests": 200,
    }
    if kind == OWN:
        model["dedicated"] = ["quiet"]
    return {
        "app": "floods",
        "models": {"m": model},
        "gateway": {"port": 0, "authentication": "keys"},
    }


async def measure(url: str, service: Service, kind: str, seconds: float) -> Any:
    """Send the requests of both tenants; return the quiet tenant's samples."""

    def key(name: str, **settings: int) -> str:
        asked = {"name": name, **settings}
        return service.ask("POST", "/tenants", TenantWithKey, json=asked).key

    quiet = key("quiet")
    flood = (
        quiet
        if kind == PLAIN
        else key("flood", **({"max_parallel_requests": 8} if kind == LIMITED else {}))
    )

    def load(key: str, rate: float, seed: int) -> Load:
        target = Target(f"{url}/v2/models/m/infer", [BODY], {"X-API-Key": key})
        due = [arrival.at for arrival in gamma(rate, seconds, seed=seed)]
        return Load(target, rate, due=due)

    first, second = load(quiet, QUIET, 1), load(flood, FLOOD, 2)
    loads = [first] if kind == ALONE else [first, second]
    await asyncio.gather(*(one.run() for one in loads))
    return first.samples


def run(kind: str, seconds: float) -> dict[str, float]:
    """Run one case, and return the quiet tenant's results."""
    with (
        tempfile.TemporaryDirectory() as folder,
        services.running(spec_of(kind), Path(folder)) as url,
    ):
        service = Service(None, Path(folder) / "state")
        samples = asyncio.run(measure(url, service, kind, seconds))
    took = [s.latency_s for s in samples if s.is_answered]
    return {
        "sent": len(samples),
        "refused": sum(not s.is_answered for s in samples),
        "p50": quantile(took, 0.5),
        "p99": quantile(took, 0.99),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case, print a table, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path, default=Path("floods.json"))
    given = parser.parse_args(arguments)
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(given.rounds):
        for kind in (ALONE, FAIR, PLAIN, LIMITED, OWN):
            results.setdefault(kind, []).append(run(kind, given.seconds))
    table = Table(title="the quiet tenant, medians of the rounds")
    table.add_column("case")
    for title in ("sent", "not answered", "p50 ms", "p99 ms", "p99 beside no flood"):
        table.add_column(title, justify="right")
    alone = median(r["p99"] for r in results[ALONE])
    for kind, rounds in results.items():
        mid = {name: median(r[name] for r in rounds) for name in rounds[0]}
        more = mid["p99"] - alone
        table.add_row(
            kind,
            f"{mid['sent']:.0f}",
            f"{mid['refused']:.0f}",
            f"{mid['p50'] * 1000:.0f}",
            f"{mid['p99'] * 1000:.0f}",
            f"{more * 1000:+.0f} ms",
        )
    Console().print(table)
    report = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "results": results,
    }
    path = given.out
    path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
