"""Suite "engine_kills": streams of every kind while vLLM servers are killed.

Four serving stacks (*fronts*) run SmolLM2 in float32: two plain vLLM servers; the same
servers behind a proxy that sends the prompt and the tokens so far to the other server,
as Dynamo does; two vLLM engines as our replicas (``engine: vllm``); and our own engine
in three stages. A greedy, a sampled, a penalised and a structured stream, and one with
two choices, run at the same time. In each round, a computing process is killed at a
random time, and the tokens are compared with those of undisturbed streams of the same
front. The same number of rounds without a kill shows how often an engine's tokens
differ by themselves. Our fronts also lose a replica as planned, by scaling in while
streams run. The proxy is part of the client, so it costs no time of its own. Each vLLM
server has half of the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from benchmarks.members import Options
from benchmarks.rivals.environment import python_of
from benchmarks.serving import others, services
from benchmarks.serving.kill_rounds import Front, OnStep, measure
from benchmarks.serving.others import VLLM
from benchmarks.suites.kills import BACK_S, SETTLED_S, victim_of, wait_whole, worker_of
from multiworld.demo import smollm2
from multiworld.serve.controller.answers import Scaled
from multiworld.serve.controller.client import Service

PLAIN, PROXY = "vLLM", "vLLM, naive proxy"
BEHIND, STAGES = "vLLM behind multiworld", "multiworld, three stages"
"""Names of the fronts."""

CORES = sorted(os.sched_getaffinity(0))
HALVES = CORES[: max(1, len(CORES) // 2)], CORES[len(CORES) // 2 :]
"""Cores of the two vLLM servers."""


def run(options: Options, on_step: OnStep) -> None:
    """Measure all fronts; those with vLLM only if it is included."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        scratch = Path(name) / "stages"
        scratch.mkdir()
        with _ours(STAGES, _stages(folder), "middle", scratch, draw) as front:
            _measured([front], options.rounds, draw, on_step)
        if VLLM not in options.apart:
            return
        python = python_of(VLLM, Path(options.environments))
        scratch = Path(name) / "behind"
        scratch.mkdir()
        on_step(("step", (0.2, f"starting {BEHIND} (may take minutes)")))
        with _ours(BEHIND, _engine(folder, python), "0", scratch, draw) as front:
            _measured([front], options.rounds, draw, on_step)
        on_step(("step", (0.6, f"starting {PLAIN} (may take minutes)")))
        servers = Servers(python, folder, Path(name), stack, draw)
        fronts = [
            Front(
                *(who, servers.urls, str(folder), servers.kill, servers.heal),
                is_proxied=is_proxied,
            )
            for who, is_proxied in ((PLAIN, False), (PROXY, True))
        ]
        _measured(fronts, options.rounds, draw, on_step)


def _measured(
    fronts: list[Front], rounds: int, draw: random.Random, on_step: OnStep
) -> None:
    """Measure fronts; keep the results so far if a server does not come back."""
    try:
        asyncio.run(measure(fronts, rounds, draw, on_step))
    except (RuntimeError, OSError, TimeoutError, aiohttp.ClientError) as error:
        names = " and ".join(front.name for front in fronts)
        text = f"{names}: ended early, {type(error).__name__}: {error}"
        on_step(("note", text[:300]))


def _stages(folder: Path) -> dict[str, Any]:
    return {
        "path": str(folder),
        "generation": {"dtype": "float32", "deterministic": True},
        "stages": [{"name": "front"}, {"name": "middle", "replicas": 2}, {}],
    }


def _engine(folder: Path, python: Path) -> dict[str, Any]:
    return {
        "path": str(folder),
        "engine": "vllm",
        "engine_python": str(python),
        "generation": {"dtype": "float32", "max_model_len": 2048},
        "cpus": len(HALVES[0]),
        "replicas": 2,
    }


@contextlib.contextmanager
def _ours(
    name: str, model: dict[str, Any], stage: str, scratch: Path, draw: random.Random
) -> Iterator[Front]:
    spec = {"app": "bench", "models": {"m": model}, "gateway": {"port": 0}}
    model["deadline_s"] = 300.0
    with services.running(spec, scratch) as url:
        service = Service(None, scratch / "state")

        async def kill() -> None:
            victim, _ = await asyncio.to_thread(victim_of, service, draw)
            os.kill(victim, signal.SIGKILL)

        async def heal() -> None:
            await asyncio.to_thread(wait_whole, service)

        async def scale(replicas: int) -> None:
            what = {"model": "m", "stage": stage, "replicas": replicas}
            await asyncio.to_thread(service.ask, "POST", "/scale", Scaled, json=what)

        async def undo_move() -> None:
            await scale(2)
            await heal()

        move = partial(scale, 1)
        yield Front(name, [url], "m", kill, heal, move, undo_move)


class Servers:
    """Two vLLM servers; a killed one is restarted by ``heal``."""

    def __init__(
        self,
        python: Path,
        folder: Path,
        scratch: Path,
        stack: contextlib.ExitStack,
        draw: random.Random,
    ) -> None:
        self._python, self._folder, self._scratch = python, folder, scratch
        self._stack, self._draw, self._starts = stack, draw, 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self.urls: list[str] = []
        for place in range(2):
            url, process = self._start(place)
            self.urls.append(url)
            self._processes.append(process)

    def _start(self, place: int) -> tuple[str, subprocess.Popen[bytes]]:
        self._starts += 1
        scratch = self._scratch / f"vllm-{self._starts}"
        scratch.mkdir()
        running = others.running(VLLM, self._python, self._folder, scratch)
        os.sched_setaffinity(0, HALVES[place])  # for this thread and its children
        try:
            return self._stack.enter_context(running)
        finally:
            os.sched_setaffinity(0, CORES)

    async def kill(self) -> None:
        """Kill the computing process of a random server, which then exits."""
        os.kill(worker_of(self._draw.choice(self._processes)), signal.SIGKILL)
        await asyncio.sleep(SETTLED_S)

    async def heal(self) -> None:
        """Restart the killed server."""
        for place, process in enumerate(self._processes):
            if not await asyncio.to_thread(_is_alive, self.urls[place]):
                await asyncio.to_thread(process.wait, BACK_S)
                url, again = await asyncio.to_thread(self._start, place)
                self.urls[place], self._processes[place] = url, again


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False
