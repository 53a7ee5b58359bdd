"""Study: text generation under changing load, autoscaled and with fixed fleets.

``python -m benchmarks.studies.elastic_text`` sends one trace to real services whose
stages sleep, and to the simulator, and compares them. ``attained`` is the share of the
streams whose time to the first token and time per token meet the objectives. With
``--slow N``, stages, objectives and windows take N times as long, and streams arrive N
times less often, so that the machine's own work, which the simulator ignores, has less
effect.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.serving import services
from benchmarks.studies.replica_seconds import replica_seconds
from multiworld.serve.controller.answers import StatusAnswer
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.scaling import reference_policies, token_policy
from multiworld.serve.load.summary import quantile
from multiworld.serve.simulation.model_builder import pipeline_of, with_fleet
from multiworld.serve.simulation.pipeline import Arrival
from multiworld.serve.simulation.replay import simulate
from multiworld.serve.simulation.traces import generated
from multiworld.serve.spec.loader import parse_spec

MS = (0.3, 0.6, 0.4)
"""Milliseconds that each stage takes for a token."""

TTFT_S, TPOT_S = 2.0, 0.06
"""Objectives in seconds: time to the first token, and for each further one."""

TOKENS = "prompt=200,answer=60"
"""Mean number of tokens of prompts and answers."""

OURS, QUEUED = "by tokens", "Ray Serve's rule"
FLEETS = {"fixed 1-1-1": (1, 1, 1), "fixed 2-2-2": (2, 2, 2), "fixed 4-4-4": (4, 4, 4)}
"""Contenders."""

BOUNDS = {"min_replicas": 1, "max_replicas": 6}
WINDOWS_S = {
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 10.0,
    "look_back_period_s": 5.0,
}
"""Limits and windows of an autoscaled stage."""

START_S = 0.7
"""Seconds that a simulated replica takes to start, measured on real ones here."""

Times = tuple[float, float]
"""Seconds to the first token, and for each further one."""


def trace_of(seconds: float, seed: int, slow: float = 1.0) -> list[Arrival]:
    """Return a trace that is busy in the middle; ``slow`` divides its rates."""
    parts = ((1, 0.2), (6, 0.4), (1, 0.4))
    text = "+".join(
        f"poisson:rate={rate / slow},seconds={share * seconds},{TOKENS}"
        for rate, share in parts
    )
    return generated(text, seed)


def spec_of(kind: str, slow: float = 1.0) -> dict[str, Any]:
    """Return the spec of a contender; ``slow`` multiplies all times."""
    ms = [slow * each for each in MS]
    windows = {name: slow * seconds for name, seconds in WINDOWS_S.items()}
    stages: list[dict[str, Any]] = [{"item_ms": each} for each in ms]
    for k, stage in enumerate(stages):
        if kind in FLEETS:
            stage["replicas"] = FLEETS[kind][k]
        else:
            stage["autoscaling_config"] = {**BOUNDS, **windows}
    model: dict[str, Any] = {
        "factory": "benchmarks.serving.paced_text:model",
        "options": {"ms": ms},
        "generation": {
            "ttft_ms": 1000 * slow * TTFT_S,
            "tpot_ms": 1000 * slow * TPOT_S,
        },
        "deadline_s": 120.0,
        "stages": stages,
    }
    if kind == QUEUED:
        model["scaling"] = (
            "multiworld.serve.controller.scaling.reference_policies:queued"
        )
    return {"app": "elastic-text", "models": {"m": model}, "gateway": {"port": 0}}


async def _ask(client: httpx.AsyncClient, url: str, arrival: Arrival) -> Times | None:
    """Read one stream; return its times, or None if it failed."""
    body = {
        "model": "m",
        # Every prompt is different, so that no cache contains a prefix of it.
        "prompt": [random.randrange(256) for _ in range(max(1, arrival.prompt))],
        "max_tokens": max(1, arrival.answer),
        "ignore_eos": True,
        "stream": True,
    }
    began = time.monotonic()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as got:
            times = [
                time.monotonic()
                async for line in got.aiter_lines()
                if line.startswith("data: {") and '"error"' not in line
            ]
    except httpx.HTTPError:
        return None
    if len(times) < max(1, arrival.answer):
        return None
    return times[0] - began, (times[-1] - times[0]) / max(1, len(times) - 1)


async def play(
    url: str, trace: Sequence[Arrival], count: Callable[[], int]
) -> tuple[list[Times | None], float]:
    """Send a trace; return the times of each stream, and the replica-seconds."""
    # ``count``: function that returns the current number of replicas.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=130.0, limits=limits) as client:
        begin = time.monotonic()

        async def one(arrival: Arrival) -> Times | None:
            await asyncio.sleep(begin + arrival.at - time.monotonic())
            return await _ask(client, url, arrival)

        running = asyncio.gather(*map(one, trace))
        replica_s = await replica_seconds(running, count)
        return await running, replica_s


def run_real(
    kind: str, trace: Sequence[Arrival], slow: float
) -> tuple[list[Times | None], float]:
    """Run a contender as a real service."""
    with (
        tempfile.TemporaryDirectory() as folder,
        services.running(spec_of(kind, slow), Path(folder)) as url,
    ):
        service = Service(None, Path(folder) / "state")

        def count() -> int:
            status = service.ask("GET", "/status", StatusAnswer)
            return sum(not p.is_gateway for p in status.processes)

        return asyncio.run(play(url, trace, count))


def run_simulated(
    kind: str, trace: Sequence[Arrival], slow: float
) -> tuple[float, float]:
    """Return the simulator's attainment and replica-seconds."""
    spec = parse_spec(yaml.safe_dump(spec_of(kind, slow))).models["m"]
    policy = token_policy.decide if kind == OURS else reference_policies.queued
    if kind in FLEETS:
        policy = reference_policies.fixed
    model = pipeline_of("m", spec, policy, None, START_S)
    if kind in FLEETS:
        model = with_fleet(model, FLEETS[kind])
    (outcome,) = simulate([model], [trace], random.Random(0).random)
    return outcome.attained / len(trace), sum(outcome.replica_s)


def _row(
    kind: str,
    times: Sequence[Times | None],
    cost: float,
    simulated: tuple[float, float],
    slow: float,
) -> list[str]:
    done = [each for each in times if each is not None]
    good = sum(a <= slow * TTFT_S and b <= slow * TPOT_S for a, b in done)
    ttft, tpot = [each[0] for each in done], [each[1] for each in done]
    return [
        kind,
        f"{good / len(times):.1%}",
        f"{cost:.0f}",
        f"{1000 * statistics.median(ttft):.0f} / {1000 * quantile(ttft, 0.99):.0f}",
        f"{1000 * statistics.median(tpot):.0f} / {1000 * quantile(tpot, 0.99):.0f}",
        str(len(times) - len(done)),
        f"{simulated[0]:.1%}",
        f"{simulated[1]:.0f}",
    ]


def main() -> None:
    """Run the study, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slow", type=float, default=1.0)
    wish = parser.parse_args()
    trace = trace_of(wish.seconds, wish.seed, wish.slow)
    titles = ("", "attained", "replica-s", "ttft p50 / p99 ms", "tpot p50 / p99 ms")
    table = Table(*titles, "lost", "simulated: attained", "replica-s")
    for kind in (OURS, QUEUED, *FLEETS):
        times, cost = run_real(kind, trace, wish.slow)
        simulated = run_simulated(kind, trace, wish.slow)
        table.add_row(*_row(kind, times, cost, simulated, wish.slow))
    Console(width=140).print(table)
    Console().print(f"{len(trace)} streams in {wish.seconds:g} s")


if __name__ == "__main__":
    main()
