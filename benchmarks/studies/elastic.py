"""Value of autoscaling: SLO attainment, goodput and cost under a varying load.

``python -m benchmarks.studies.elastic [--ray PYTHON] [--seconds 72] [--rounds
2]``. There are three models of two stages, which take 40 and 120 ms for a request. The
stages sleep, so that two cores are enough. Each model has a trace of bursts, which is
the same for all contenders:

- multiworld with an objective for 99 % (the default) and for 95 % of the answers,
- multiworld with Ray Serve's parameters only,
- multiworld with fixed fleets of the minimum, a medium and the maximum size,
- Ray Serve with its own autoscaling, and with a fixed fleet of the maximum size.

In each round, all contenders run one at a time; each round has traces of its own.
``simulated`` is the result of the simulator for the same traces.

``attained`` is the share of all requests that were answered with 200 within 1.5 s after
they were due. Replica-seconds count the replicas of the stages twice a second,
including starting ones. Writes ``elastic.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.rivals.environment import HERE
from benchmarks.serving import services
from benchmarks.studies.replica_seconds import replica_seconds
from multiworld.serve.controller.answers import StatusAnswer
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.scaling import default_policy, reference_policies
from multiworld.serve.load.generator import Load, Target
from multiworld.serve.load.summary import Sample, quantile
from multiworld.serve.simulation.model_builder import pipeline_of, with_fleet
from multiworld.serve.simulation.pipeline import Arrival
from multiworld.serve.simulation.replay import simulate
from multiworld.serve.simulation.score import judge
from multiworld.serve.simulation.traces import generated
from multiworld.serve.spec.loader import parse_spec

MS = (40.0, 120.0)
"""Milliseconds that each stage takes for a request."""

OBJECTIVE_S = 1.5
"""Latency objective, in seconds."""

MAX_REPLICAS = 4
"""Maximum number of replicas of a stage."""

SHARES = {"ours": 0.99, "ours, 19 of 20": 0.95}
"""Share of answers that must meet the objective, by contender."""

CONFIG = {
    "min_replicas": 1,
    "max_replicas": MAX_REPLICAS,
    "target_ongoing_requests": 2.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 10.0,
    "look_back_period_s": 5.0,
    "metrics_interval_s": 1.0,  # Ray's default is 10 s; this is our default
}
BODY = orjson.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
)
FLEETS = {"fixed, least": (1, 1), "fixed, middle": (1, 2), "fixed, most": (2, 4)}
"""Replicas of each stage, by contender with a fixed fleet."""

RAYS = {"Ray Serve": None, "Ray Serve, fixed, most": (2, 4)}
"""Replicas of each stage, by contender on Ray Serve; None: autoscaling."""

START_S = 0.5
"""Seconds that a simulated replica takes to start, measured on real ones here."""


def traces(seconds: float, seed: int) -> dict[str, list[Arrival]]:
    """Return a trace for each model; their bursts are at different times."""
    unit = seconds / 12
    patterns = {
        "a": ((1, 3), (15, 2), (1, 4), (10, 1), (1, 2)),
        "b": ((12, 2), (1, 5), (12, 2), (1, 3)),
        "c": ((2, 6), (18, 1), (2, 5)),
    }
    found = {}
    for name, parts in patterns.items():
        texts = [f"gamma:rate={r},seconds={u * unit},cv=2" for r, u in parts]
        found[name] = generated("+".join(texts), seed)
    return found


def spec_of(kind: str) -> dict[str, Any]:
    """Return the spec of one of multiworld's contenders."""
    factory = "benchmarks.serving.paced:model"
    stages: list[dict[str, Any]] = []
    for k, ms in enumerate(MS):
        stage: dict[str, Any] = {"max_batch_size": 1, "item_ms": ms}
        if kind in FLEETS:
            stage["replicas"] = FLEETS[kind][k]
        else:
            stage["autoscaling_config"] = CONFIG
        stages.append(stage)
    model: dict[str, Any] = {
        "factory": factory,
        "options": {"ms": list(MS)},
        "stages": stages,
    }
    if kind in SHARES:
        model["objective_ms"] = OBJECTIVE_S * 1000
        model["objective_share"] = SHARES[kind]
    return {
        "app": "elastic",
        "models": dict.fromkeys("abc", model),
        "gateway": {"port": 0},
    }


# Runs.


async def play(
    urls: dict[str, str], asked: dict[str, list[Arrival]], count: Any
) -> dict[str, Any]:
    """Send all traces at once; return the samples and the replica-seconds."""
    # ``count``: function that returns the current number of replicas.
    loads = {
        name: Load(
            Target(url, [BODY], {"Content-Type": "application/json"}),
            1.0,
            due=[arrival.at for arrival in asked[name]],
        )
        for name, url in urls.items()
    }
    running = asyncio.gather(*(load.run() for load in loads.values()))
    cost = await replica_seconds(running, count)
    await running
    return {
        "samples": {n: load.samples for n, load in loads.items()},
        "cost": cost,
    }


def run_ours(kind: str, asked: dict[str, list[Arrival]]) -> dict[str, Any]:
    """Run one of multiworld's contenders."""
    with (
        tempfile.TemporaryDirectory() as folder,
        services.running(spec_of(kind), Path(folder)) as url,
    ):
        service = Service(None, Path(folder) / "state")

        def count() -> int:
            status = service.ask("GET", "/status", StatusAnswer)
            return sum(not p.is_gateway for p in status.processes)

        urls = {name: f"{url}/v2/models/{name}/infer" for name in asked}
        return asyncio.run(play(urls, asked, count))


@contextlib.contextmanager
def ray(python: Path, fleet: tuple[int, ...] | None) -> Iterator[tuple[str, Any]]:
    """Run Ray Serve; yield its URL, and a function that counts its replicas."""
    # ``fleet``: replicas of each stage; None: autoscaling.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config: dict[str, Any] = {"models": dict.fromkeys("abc", MS), "fleet": fleet}
    config["autoscaling_config"] = CONFIG
    process = subprocess.Popen(
        [str(python), str(HERE / "ray_elastic.py"), str(port), json.dumps(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        while (line := process.stdout.readline()) and line.strip() != "ready":
            pass
        if not line:
            raise RuntimeError("Ray Serve did not start; is ray[serve] installed?")
        os.set_blocking(process.stdout.fileno(), False)
        last = [0]

        def count() -> int:
            for text in process.stdout.readlines():  # type: ignore[union-attr]
                with contextlib.suppress(ValueError):
                    last[0] = sum(json.loads(text).values())
            return last[0]

        yield f"http://127.0.0.1:{port}", count
    finally:
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_ray(python: Path, kind: str, asked: dict[str, list[Arrival]]) -> dict[str, Any]:
    """Run Ray Serve with its autoscaling, or with a fixed fleet."""
    with ray(python, RAYS[kind]) as (url, count):
        return asyncio.run(play({n: f"{url}/{n}" for n in asked}, asked, count))


def run_simulated(kind: str, asked: dict[str, list[Arrival]]) -> dict[str, float]:
    """Return the attainment and cost of one of our contenders in the simulator."""
    spec = parse_spec(yaml.safe_dump(spec_of(kind))).models["a"]
    chosen = default_policy.decide if kind not in FLEETS else reference_policies.fixed
    good = cost = sent = 0.0
    for trace in asked.values():
        model = pipeline_of("m", spec, chosen, None, START_S)
        if kind in FLEETS:
            model = with_fleet(model, FLEETS[kind])
        (outcome,) = simulate([model], [trace], random.Random(0).random)
        took = [t for _, t in outcome.requests if t >= 0]
        good += sum(t <= OBJECTIVE_S for t in took)
        cost += judge(kind, outcome).replica_s
        sent += len(trace)
    return {"attained": good / sent, "cost": cost}


# Results.


def numbers(found: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return the results of a run."""
    samples: list[Sample] = [s for one in found["samples"].values() for s in one]
    took = [s.latency_s for s in samples if s.is_answered]
    good = sum(t <= OBJECTIVE_S for t in took)
    return {
        "sent": len(samples),
        "attained": good / len(samples),
        "goodput": good / seconds,
        "cost": found["cost"],
        "p50": quantile(took, 0.5),
        "p99": quantile(took, 0.99),
        "lost": len(samples) - len(took),
    }


def show(results: dict[str, list[dict[str, float]]], simulated: dict[str, Any]) -> None:
    """Print the medians of the rounds."""
    table = Table(title="medians of the rounds")
    table.add_column("contender")
    for title in ("attained", "good/s", "replica-s", "p50 ms", "p99 ms", "lost"):
        table.add_column(title, justify="right")
    table.add_column("simulated", justify="right")
    for name, rounds in results.items():
        mid = {key: median(r[key] for r in rounds) for key in rounds[0]}
        sim = simulated.get(name)
        table.add_row(
            name,
            f"{mid['attained']:.1%}",
            f"{mid['goodput']:.1f}",
            f"{mid['cost']:.0f}",
            f"{mid['p50'] * 1000:.0f}",
            f"{mid['p99'] * 1000:.0f}",
            f"{mid['lost']:.0f}",
            f"{sim['attained']:.1%}, {sim['cost']:.0f}" if sim else "-",
        )
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every contender, print a table, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ray", type=Path, help="an interpreter that has ray[serve]")
    parser.add_argument("--seconds", type=float, default=72.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("elastic.json"))
    given = parser.parse_args(arguments)
    names = [*SHARES, "ours, Ray's parameters", *FLEETS]
    results: dict[str, list[dict[str, float]]] = {}
    simulated: dict[str, list[dict[str, float]]] = {}
    for number in range(given.rounds):
        asked = traces(given.seconds, seed=number)
        for name in names:
            found = numbers(run_ours(name, asked), given.seconds)
            results.setdefault(name, []).append(found)
            simulated.setdefault(name, []).append(run_simulated(name, asked))
            Console().print(number, name, found)
        for name in RAYS if given.ray is not None else ():
            found = numbers(run_ray(given.ray, name, asked), given.seconds)
            results.setdefault(name, []).append(found)
            Console().print(number, name, found)
    medians = {
        name: {key: median(r[key] for r in rounds) for key in rounds[0]}
        for name, rounds in simulated.items()
    }
    show(results, medians)
    report = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "seconds": given.seconds,
        "results": results,
        "simulated": simulated,
    }
    given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
