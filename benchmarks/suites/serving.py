"""Suite "serving": requests per second, latency, and the cost of gateway and hops.

All services run at once; 1 and then 32 closed-loop clients send to one after the other.
There are two pipelines of three stages: one without computation, which shows the
overhead, and the sentence encoder MiniLM. Each also runs as a single stage behind the
same gateway, as the upper bound for three stages. Two more upper bounds omit everything
that serving adds: *bare*, a FastAPI route that returns its JSON, and *chain*, the same
route before three processes that forward the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import aiohttp

from benchmarks.members import Options, Step
from benchmarks.rivals.environment import python_of
from benchmarks.serving import BARE, CHAIN, OURS
from benchmarks.serving.clients import ask
from benchmarks.serving.services import (
    EMPTY,
    MINILM,
    Service,
    ceiling,
    family_of,
    ours,
    pids_of,
    rays,
    running,
    spec_of,
)

CLIENTS = (1, 32)
"""Numbers of closed-loop clients."""

SECONDS, QUICK_S = 4.0, 0.5
"""Seconds of one measurement, and of a quick one."""

IDLE_S = 5.0
"""Seconds over which an idle service is measured, after a wait of the same length."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


def run(options: Options, on_step: OnStep) -> None:
    """Start all services, and measure them."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        on_step(("step", (0.0, "one idle pipeline")))
        with running(spec_of(EMPTY), folder):
            asyncio.run(_idle(folder / "state", options, on_step))
        on_step(("step", (0.0, "starting our services")))
        services = stack.enter_context(ours(folder))
        for name in (BARE, CHAIN):
            services.append(stack.enter_context(ceiling(name)))
        if "ray" in options.apart:
            python = python_of("ray", Path(options.environments))
            for pipeline in (EMPTY, MINILM):
                on_step(("step", (0.0, f"starting Ray Serve: {pipeline}")))
                services.append(stack.enter_context(rays(python, pipeline, folder)))
        asyncio.run(_measure(services, folder / "state", options, on_step))


async def _measure(
    services: list[Service], state: Path, options: Options, on_step: OnStep
) -> None:
    seconds = QUICK_S if options.is_quick else SECONDS
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        for service in services:
            on_step(("step", (0.0, f"warming up: {service.name}, {service.pipeline}")))
            await ask(http, service, 4, min(1.0, seconds))
        total = options.rounds * len(CLIENTS) * len(services)
        done = 0
        for number in range(options.rounds):
            await _cost(http, services[0], state, seconds, on_step)
            for clients in CLIENTS:
                for service in services if number % 2 else services[::-1]:
                    text = f"{clients} clients, {service.name}, {service.pipeline}"
                    on_step(("step", (done / total, text)))
                    await _round(http, service, clients, seconds, on_step)
                    done += 1
        on_step(("step", (1.0, "idle")))
        await _idle(state, options, on_step)


async def _round(
    http: aiohttp.ClientSession,
    service: Service,
    clients: int,
    seconds: float,
    on_step: OnStep,
) -> None:
    answers = await ask(http, service, clients, seconds)
    found = {
        ("rate", "requests/s"): answers.rate,
        ("p50", "ms"): answers.quantile_ms(0.5),
        ("p99", "ms"): answers.quantile_ms(0.99),
    }
    for (what, unit), value in found.items():
        kind = f"{service.pipeline}: {what} by clients"
        on_step(("sample", (kind, clients, service.name, unit, value)))


async def _cost(
    http: aiohttp.ClientSession,
    service: Service,
    state: Path,
    seconds: float,
    on_step: OnStep,
) -> None:
    """Report the CPU time of a request to the empty stages, by process."""
    assert (service.name, service.pipeline) == (OURS, EMPTY)
    parts = {"gateway": "gateway", "three workers": f"{EMPTY}/"}
    pids = {part: pids_of(state, prefix) for part, prefix in parts.items()}
    before = {part: cpu_s(found) for part, found in pids.items()}
    answers = await ask(http, service, CLIENTS[-1], seconds)
    for part, found in pids.items():
        taken_us = (cpu_s(found) - before[part]) / len(answers.latencies_s) * 1e6
        kind = "processor time a request, by clients"
        on_step(("sample", (kind, CLIENTS[-1], part, "us", taken_us)))


async def _idle(state: Path, options: Options, on_step: OnStep) -> None:
    seconds = 1.0 if options.is_quick else IDLE_S
    await asyncio.sleep(seconds)  # let one-time work after the start finish
    pids = family_of(state)
    before = cpu_s(pids)
    await asyncio.sleep(seconds)
    share = (cpu_s(pids) - before) / seconds * 100
    kind = "idle, by processes"
    on_step(("sample", (kind, len(pids), "whole service", "% of a core", share)))


def cpu_s(pids: Iterable[int]) -> float:
    """Return the CPU seconds that these processes have used in total."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")
