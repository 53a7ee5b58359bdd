"""Suite "engine_kills": streams of every kind while vLLM's servers are killed.

Four fronts of SmolLM2 in float32: two servers of vLLM without anything; the same behind
a proxy that sends the prompt and the tokens so far to the other server, as Dynamo does;
two of vLLM as replicas of ours (``engine: vllm``); and three stages of ours. Greedy,
sampled, penalised and structured streams and one of two choices run at once. In each
round a process that computes is killed, at a drawn time, and the tokens are compared
with those of undisturbed streams of the same front. As many rounds without a kill show
what an engine does differently by itself. The proxy is part of the client, so
it costs no time of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from benchmarks.members import Options, Step
from benchmarks.rivals.environment import python_of
from benchmarks.serving import others, services
from benchmarks.serving.others import VLLM
from benchmarks.suites.kills import BACK_S, SETTLED_S, victim_of, wait_whole, worker_of
from multiworld.serve.control.client import Service
from multiworld.serve.models import smollm2

PLAIN, PROXY = "vLLM", "vLLM, naive proxy"
BEHIND, STAGES = "vLLM behind multiworld", "multiworld, three stages"
"""Names of the fronts."""

PROMPT, ANSWER = 64, 80
"""Tokens of a prompt, and of an answer."""

DELAY_S = (0.5, 3.0)
"""Minimum and maximum seconds from the start of the streams to a kill."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 50, "seed": 7},
    "penalised": {
        "temperature": 0.9,
        "seed": 3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
    "structured": {
        "temperature": 0.8,
        "seed": 5,
        "structured_outputs": {"regex": "([a-z]{3,7} ){40}"},
    },
    "two choices": {"temperature": 0.9, "seed": 11, "n": 2},
}

CUT, WRONG = "streams cut by a kill", "tokens wrong or missing"
CONTROL = "tokens different though nothing was killed"
PAUSE, TOKEN = "longest pause of a stream at a kill", "time for a token"
"""Measurements; the last one is without kills."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


@dataclass(slots=True)
class Text:
    """What a client of one stream has.

    Attributes:
        tokens: Tokens by choice.
        gaps_s: Times between two events.
        is_cut: Whether it ended early.
        last_at: Time of the last event, on the monotonic clock.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    is_cut: bool = False
    last_at: float | None = None

    def wrong(self, wanted: Text) -> int:
        """Return how many tokens are missing or other than wanted."""
        found = 0
        for choice, tokens in wanted.tokens.items():
            mine = self.tokens.get(choice, [])
            pairs = zip(mine, tokens, strict=False)
            found += sum(a != b for a, b in pairs) + abs(len(tokens) - len(mine))
        return found


@dataclass(slots=True)
class Front:
    """One front.

    Attributes:
        urls: URLs of its servers; streams are dealt out among them.
        model: Name of the model there.
        is_proxied: Whether a broken stream is sent to the next server.
        kill: Kills a process that computes.
        heal: Waits until all servers are back.
    """

    name: str
    urls: list[str]
    model: str
    kill: Callable[[], Awaitable[None]]
    heal: Callable[[], Awaitable[None]]
    is_proxied: bool = False


def run(options: Options, on_step: OnStep) -> None:
    """Measure all fronts; those with vLLM only if it is included.

    Raises:
        RuntimeError: A server did not start.
    """
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        scratch = Path(name) / "stages"
        scratch.mkdir()
        with _ours(STAGES, _stages(folder), scratch, draw) as front:
            _measured([front], options.rounds, draw, on_step)
        if VLLM not in options.apart:
            return
        python = python_of(VLLM, Path(options.environments))
        scratch = Path(name) / "behind"
        scratch.mkdir()
        on_step(("step", (0.2, f"starting {BEHIND} (may take minutes)")))
        with _ours(BEHIND, _engine(folder, python), scratch, draw) as front:
            _measured([front], options.rounds, draw, on_step)
        on_step(("step", (0.6, f"starting {PLAIN} (may take minutes)")))
        servers = Servers(python, folder, Path(name), stack, draw)
        fronts = [
            Front(who, servers.urls, str(folder), servers.kill, servers.heal, proxied)
            for who, proxied in ((PLAIN, False), (PROXY, True))
        ]
        _measured(fronts, options.rounds, draw, on_step)


def _measured(
    fronts: list[Front], rounds: int, draw: random.Random, on_step: OnStep
) -> None:
    """Measure fronts; keep the results so far if a server cannot be had back."""
    try:
        asyncio.run(_measure(fronts, rounds, draw, on_step))
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
        "replicas": 2,
    }


@contextlib.contextmanager
def _ours(
    name: str, model: dict[str, Any], scratch: Path, draw: random.Random
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

        yield Front(name, [url], "m", kill, heal)


class Servers:
    """Two servers of vLLM, of which a killed one is started again."""

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
        for _ in range(2):
            url, process = self._start()
            self.urls.append(url)
            self._processes.append(process)

    def _start(self) -> tuple[str, subprocess.Popen[bytes]]:
        self._starts += 1
        scratch = self._scratch / f"vllm-{self._starts}"
        scratch.mkdir()
        running = others.running(VLLM, self._python, self._folder, scratch)
        return self._stack.enter_context(running)

    async def kill(self) -> None:
        """Kill the process of one of them that computes; its server then exits."""
        os.kill(worker_of(self._draw.choice(self._processes)), signal.SIGKILL)
        await asyncio.sleep(SETTLED_S)

    async def heal(self) -> None:
        """Start the killed one again."""
        for place, process in enumerate(self._processes):
            if not await asyncio.to_thread(_is_alive, self.urls[place]):
                await asyncio.to_thread(process.wait, BACK_S)
                url, again = await asyncio.to_thread(self._start)
                self.urls[place], self._processes[place] = url, again


def _is_alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


async def _measure(
    fronts: list[Front], rounds: int, draw: random.Random, on_step: OnStep
) -> None:
    timeout = aiohttp.ClientTimeout(total=BACK_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for front in fronts:
            await _round(http, front)  # warms up
            wanted = await _round(http, front)
            token_s = statistics.median(s for t in wanted.values() for s in t.gaps_s)
            on_step(("sample", (TOKEN, len(KINDS), front.name, "ms", 1000 * token_s)))
            for _ in range(rounds):
                for kind, one in (await _round(http, front)).items():
                    different = float(one.wrong(wanted[kind]))
                    name = f"{CONTROL}: {kind}"
                    on_step(("sample", (name, 1, front.name, "", different)))
            for number in range(rounds):
                text = f"{front.name}, kill {number + 1} of {rounds}"
                on_step(("step", (number / rounds, text)))
                found = await _round(http, front, draw.uniform(*DELAY_S))
                for kind, one in found.items():
                    cut, wrong = int(one.is_cut), one.wrong(wanted[kind])
                    for what, value in ((CUT, cut), (WRONG, wrong)):
                        name = f"{what}: {kind}"
                        on_step(("sample", (name, 1, front.name, "", float(value))))
                longest_s = max(max(one.gaps_s, default=0.0) for one in found.values())
                sample = (PAUSE, len(KINDS), front.name, "ms", 1000 * longest_s)
                on_step(("sample", sample))
                await front.heal()


async def _round(
    http: aiohttp.ClientSession, front: Front, kill_after_s: float | None = None
) -> dict[str, Text]:
    """Run one stream of each kind at once; return what their clients have."""
    tasks = {
        kind: asyncio.ensure_future(_stream(http, front, place, kind))
        for place, kind in enumerate(KINDS)
    }
    if kill_after_s is not None:
        await asyncio.sleep(kill_after_s)
        await front.kill()
    return {kind: await task for kind, task in tasks.items()}


async def _stream(
    http: aiohttp.ClientSession, front: Front, place: int, kind: str
) -> Text:
    text, draw = Text(), random.Random(kind)
    prompt = [draw.randrange(100, 40_000) for _ in range(PROMPT)]
    urls = front.urls[place % len(front.urls) :] + front.urls
    for url in urls[: 3 if front.is_proxied else 1]:
        made = text.tokens.get(0, [])
        body = {
            "model": front.model,
            "prompt": prompt + made,
            "max_tokens": ANSWER - len(made),
            "stream": True,
            "return_token_ids": True,
            "ignore_eos": kind != "structured",
            **KINDS[kind],
        }
        if text.tokens and "n" in body:
            break  # of several choices a proxy has no one prompt to send
        try:
            await _read(http, f"{url}/v1/completions", body, text)
            return text
        except (aiohttp.ClientError, TimeoutError, EOFError):
            continue
    text.is_cut = True
    return text


async def _read(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], text: Text
) -> None:
    """Append the tokens of an answer.

    Raises:
        EOFError: It ended early.
    """
    async with http.post(url, json=body, raise_for_status=True) as answer:
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                return
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise EOFError(str(event["error"]))
            now = time.monotonic()
            if text.last_at is not None:
                text.gaps_s.append(now - text.last_at)
            text.last_at = now
            for choice in event.get("choices", ()):
                tokens = choice.get("token_ids") or ()
                text.tokens.setdefault(choice["index"], []).extend(tokens)
    raise EOFError("no end")
