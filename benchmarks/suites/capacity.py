"""Suite "capacity": time from the kill of a replica until full capacity.

Two replicas of SmolLM2 run in our own engine and, if it is included, in vLLM on a CPU.
One of them is killed while the service is idle. Each engine is measured without a
spare, and with one that was loaded in advance; then the next kill waits until the spare
is replaced.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.members import Options, Step
from benchmarks.rivals.environment import python_of
from benchmarks.serving.others import VLLM
from benchmarks.serving.services import running
from multiworld.demo import smollm2
from multiworld.serve.controller.answers import ProcessShown, StatusAnswer
from multiworld.serve.controller.client import Service

OURS, VLLMS = "our engine", "vLLM on the CPU"
SPARE = ", a spare"
"""Names of the contenders; SPARE is the suffix of those with a spare."""

KIND = "from a kill to full capacity, by replicas"
REPLICAS = 2
WHOLE_S = 120.0
LOOK_S = 0.02  # seconds between looks at the service's state

OnStep = Callable[[Step], None]


def run(options: Options, on_step: OnStep) -> None:
    """Start one service after the other, and measure it."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    engines = [OURS, *([VLLMS] if VLLM in options.apart else [])]
    contenders = [(who, spares) for who in engines for spares in (0, 1)]
    for number, (who, spares) in enumerate(contenders):
        name = who + SPARE * spares
        on_step(("step", (number / len(contenders), f"starting {name}")))
        with tempfile.TemporaryDirectory() as at, contextlib.ExitStack() as stack:
            python = python_of(VLLM, Path(options.environments))
            spec = _spec(folder, who, str(python), spares)
            stack.enter_context(running(spec, Path(at)))
            service = Service(None, Path(at) / "state")
            for _ in range(options.rounds):
                _wait(service, REPLICAS, spares)
                done = number / len(contenders)
                on_step(("step", (done, f"{name}: killing a replica")))
                began = time.perf_counter()
                _kill(service)
                _wait(service, REPLICAS, 0)
                took_ms = 1000 * (time.perf_counter() - began)
                on_step(("sample", (KIND, REPLICAS, name, "ms", took_ms)))


def _spec(folder: Path, who: str, python: str, spares: int) -> dict[str, Any]:
    counts = {"replicas": REPLICAS, "spares": spares}
    model: dict[str, Any] = {"path": str(folder), "generation": {"dtype": "float32"}}
    if who == OURS:
        model["stages"] = [{"name": "whole", **counts}]
    else:
        model |= {"engine": "vllm", "engine_python": python, **counts}
        args = {"enforce_eager": True, "kv_cache_memory_bytes": 2**29}
        model["engine_args"] = args
        model["generation"]["max_model_len"] = 2048
    return {"app": "bench", "models": {"m": model}, "gateway": {"port": 0}}


def _replicas(service: Service) -> list[ProcessShown]:
    found = service.ask("GET", "/status", StatusAnswer).processes
    return [process for process in found if process.model]


def _kill(service: Service) -> None:
    """Kill a ready replica, and wait until the service has noticed."""
    lost = next(p for p in _replicas(service) if p.phase == "ready" and p.pid)
    assert lost.pid
    os.kill(lost.pid, signal.SIGKILL)
    limit = time.monotonic() + WHOLE_S
    while any(p.name == lost.name for p in _replicas(service)):
        if time.monotonic() > limit:
            raise RuntimeError(f"{lost.name} is not replaced")
        time.sleep(LOOK_S)


def _wait(service: Service, ready: int, spares: int) -> None:
    """Wait until a service has this many ready replicas and spares, or more."""
    limit = time.monotonic() + WHOLE_S
    while time.monotonic() < limit:
        phases = [str(process.phase) for process in _replicas(service)]
        if phases.count("ready") >= ready and phases.count("spare") >= spares:
            return
        time.sleep(LOOK_S)
    raise RuntimeError(f"the service did not reach full capacity within {WHOLE_S:g} s")
