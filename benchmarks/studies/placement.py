"""Quality of placements, compared with greedy and with bounds.

``python -m benchmarks.studies.placement [--limit 20]`` places random models, drawn from
a seed, on devices that they share: up to 20 models of 4 given stages on 64 devices.

The tests' verifier checks every answer. Writes ``placement.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from multiworld.serve.controller.placement.solver import (
    Device,
    ModelNeed,
    Node,
    Problem,
    StageNeed,
    place,
)
from multiworld.serve.controller.placement.solver.problem import GIB
from multiworld.serve.controller.placement.solver.verify import faults

SHAPES = ((4, 2, 3), (8, 4, 3), (16, 6, 4), (32, 10, 4), (64, 20, 4))
"""Numbers of devices, of models, and of stages of each model."""

SPEED = {"a100": 1.0, "l4": 3.2, "t4": 6.0}
"""Computing time of each kind of device, relative to an A100."""

PRICE = {"a100": 3.7, "l4": 0.7, "t4": 0.35}
"""Price of each kind of device."""

MEMORY = {"a100": 40, "l4": 24, "t4": 16}
"""GiB of each kind of device."""


def random_problem(devices: int, models: int, stages: int, seed: int) -> Problem:
    """Return nodes of up to four GPUs, and random models that roughly fill them."""
    draw = random.Random(seed)
    kinds = [draw.choice(list(SPEED)) for _ in range(-(-devices // 4))]
    nodes = tuple(
        Node(
            f"n{number}",
            tuple(
                Device(f"n{number}g{g}", kind, MEMORY[kind] * GIB, PRICE[kind])
                for g in range(min(4, devices - 4 * number))
            ),
            1.25e9,
        )
        for number, kind in enumerate(kinds)
    )
    able = sum(1 / SPEED[d.kind] for node in nodes for d in node.devices)
    found = []
    for number in range(models):
        needs = []
        for _ in range(stages):
            seconds = draw.lognormvariate(-4.0, 0.6)
            needs.append(
                StageNeed(
                    int(draw.uniform(1, 12) * GIB),
                    {kind: seconds * factor for kind, factor in SPEED.items()},
                    out_bytes=draw.choice((10_000, 100_000, 1_000_000)),
                    min_replicas=draw.choice((1, 1, 2)),
                )
            )
        work = sum(need.seconds["a100"] for need in needs)
        demand = able / models / work * draw.uniform(0.4, 1.3)
        found.append(
            ModelNeed(f"m{number}", tuple(needs), demand, draw.choice((1.0, 2.0)))
        )
    return Problem(nodes, tuple(found))


def shared(limit_s: float, seeds: int) -> list[dict[str, Any]]:
    """Place random models, with and without the solvers; return the rows of results."""
    rows = []
    for devices, models, stages in SHAPES:
        for seed in range(seeds):
            problem = random_problem(devices, models, stages, seed)
            greedy = place(problem, 0)
            began = time.monotonic()
            found = place(problem, limit_s)
            seconds = time.monotonic() - began
            wrong = [*faults(problem, greedy), *faults(problem, found)]
            if wrong or found.value < greedy.value * (1 - 1e-9):
                raise SystemExit(f"{devices} devices, seed {seed}: {wrong}")
            rows.append(
                {
                    "devices": devices,
                    "models": models,
                    "stages": stages,
                    "seed": seed,
                    "greedy": greedy.value,
                    "value": found.value,
                    "to_greedy": found.value / greedy.value if greedy.value else None,
                    "bound": found.bound,
                    "gap": found.gap,
                    "served": sum(found.served.values())
                    / sum(model.demand for model in problem.models),
                    "solver": found.solver,
                    "seconds": seconds,
                }
            )
    return rows


def show(found: dict[str, Any]) -> None:
    table = Table(title="models that share devices")
    for column in ("devices", "models", "to greedy", "gap to bound", "solver", "s"):
        table.add_column(column, justify="right")
    for row in found["shared"]:
        table.add_row(
            str(row["devices"]),
            f"{row['models']} x {row['stages']}",
            "" if row["to_greedy"] is None else f"{row['to_greedy']:.4f} x",
            f"{row['gap']:.2%}",
            row["solver"],
            f"{row['seconds']:.1f}",
        )
    Console().print(table)


def main() -> None:
    """Measure, write the results, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__ or "")
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("placement.json"))
    given = parser.parse_args()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("ortools", "scipy")},
        "shared": shared(given.limit, given.seeds),
    }
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
