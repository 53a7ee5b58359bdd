"""Suite "engine_kills": streams of every kind while vLLM servers are killed.

Four serving stacks (*fronts*) run SmolLM2 in float32: two plain vLLM servers; the same
servers behind a proxy that sends the prompt and the tokens so far to the other server,
as Dynamo does; two vLLM engines as our replicas (``engine: vllm``); and our own engine
in three stages. A greedy, a sampled, a penalised and a structured stream, and one with
two choices, run at the same time. In each round, a computing process is killed at a
random time, and the tokens are compared with those of undisturbed streams of the same
front. The same number of rounds without a kill shows how often an engine's tokens
differ by themselves. With ``vllm-cpu-triton``, the three fronts with vLLM also run its
runner V2, through Triton's interpreter, with a small random model. Our fronts also lose
a replica as planned, by scaling in while streams run. The proxy is part of the client,
so it costs no time of its own. Each vLLM server has half of the cores.
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
OF_V2 = " (runner V2)"
"""Names of the fronts, and the suffix of those with runner V2."""

V2 = "vllm-cpu-triton"
"""Environment of vLLM in which its runner V2 runs on a CPU."""

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
        if VLLM in options.apart:
            python = python_of(VLLM, Path(options.environments))
            engine = Engine(folder, python)
            _measure_vllm(engine, Path(name) / "v1", options, draw, stack, on_step)
        if V2 in options.apart:
            scratch = Path(name) / "v2"
            engine = _engine_v2(scratch, options, stack)
            _measure_vllm(engine, scratch, options, draw, stack, on_step)


@dataclass(frozen=True, slots=True)
class Engine:
    """vLLM with a model.

    Attributes:
        folder: Folder of the model.
        python: Interpreter of vLLM's environment.
        suffix: Added to the names of its fronts.
        length: Maximum number of tokens of a sequence.
        is_eager: Whether the model must not be compiled.
        vocabulary: Token ids of prompts are below this number.
        hung_s: Seconds without a token after which it counts as hung; None: 30.
    """

    folder: Path
    python: Path
    suffix: str = ""
    length: int = 2048
    is_eager: bool = False
    vocabulary: int = 40_000
    hung_s: float | None = None


def _engine_v2(scratch: Path, options: Options, stack: contextlib.ExitStack) -> Engine:
    """Return vLLM with runner V2; until the stack closes, its servers use runner V2."""
    from tests import vllm_stub
    from tests.tiny_decoder import VOCABULARY

    (scratch / "stub").mkdir(parents=True)
    for name, value in vllm_stub.write(scratch / "stub").items():
        stack.enter_context(patch.dict(os.environ, {name: value}))
    folder = vllm_stub.save_model(scratch / "model")
    python = python_of(V2, Path(options.environments))
    return Engine(
        folder, python, OF_V2, 256, is_eager=True, vocabulary=VOCABULARY, hung_s=120.0
    )


def _measure_vllm(
    engine: Engine,
    scratch: Path,
    options: Options,
    draw: random.Random,
    stack: contextlib.ExitStack,
    on_step: OnStep,
) -> None:
    """Measure vLLM behind multiworld, alone, and behind a proxy."""
    behind = BEHIND + engine.suffix
    (scratch / "behind").mkdir(parents=True)
    on_step(("step", (0.2, f"starting {behind} (may take minutes)")))
    model = _spec_of(engine)
    with _ours(behind, model, "0", scratch / "behind", draw) as front:
        front.vocabulary = engine.vocabulary
        _measured([front], options.rounds, draw, on_step)
    on_step(("step", (0.6, f"starting {PLAIN + engine.suffix} (may take minutes)")))
    servers = Servers(engine, scratch, stack, draw)
    fronts = [
        Front(
            who + engine.suffix,
            servers.urls,
            str(engine.folder),
            servers.kill,
            servers.heal,
            is_proxied=is_proxied,
            vocabulary=engine.vocabulary,
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


def _spec_of(engine: Engine) -> dict[str, Any]:
    eager: dict[str, Any] = {"engine_args": {"enforce_eager": True}}
    return {
        "path": str(engine.folder),
        "engine": "vllm",
        "engine_python": str(engine.python),
        "generation": {"dtype": "float32", "max_model_len": engine.length},
        "cpus": len(HALVES[0]),
        "replicas": 2,
        **({} if engine.hung_s is None else {"compute_s": engine.hung_s}),
        **(eager if engine.is_eager else {}),
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
        engine: Engine,
        scratch: Path,
        stack: contextlib.ExitStack,
        draw: random.Random,
    ) -> None:
        self._engine, self._scratch = engine, scratch
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
        engine = self._engine
        running = others.running(
            VLLM,
            engine.python,
            engine.folder,
            scratch,
            length=engine.length,
            arguments=["--enforce-eager"] if engine.is_eager else (),
        )
        # The server, which this thread starts, inherits the affinity.
        os.sched_setaffinity(0, HALVES[place])
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
