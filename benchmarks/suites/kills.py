"""Suite "kills": streams while workers are killed, on SmolLM2.

One stream or eight run all the time, in bfloat16, while workers are killed repeatedly.
Our service has three stages, with two replicas in the middle; any replica that has
streams may be killed. If vLLM is included, its computing process is killed under eight
streams; the server then exits, and is restarted at once. Each of our streams is
compared with the first one of the same prompt, token by token.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil

from benchmarks.members import Options, Step
from benchmarks.rivals.environment import python_of
from benchmarks.serving import others, services
from benchmarks.serving.others import VLLM
from multiworld.demo import smollm2
from multiworld.serve.controller.answers import StatusAnswer
from multiworld.serve.controller.client import Service

OURS = "multiworld"
ALONE, STREAMS = 1, 8
"""Numbers of concurrent streams."""

PROMPT, ANSWER = 256, 64
"""Tokens of a prompt, and of an answer."""

KILLS, THEIR_KILLS = 40, 2
"""Kills of ours in a round, and all kills of vLLM, whose restart takes minutes."""

BETWEEN_S = (1.5, 3.0)
"""Minimum and maximum seconds from full capacity to the next kill."""

BACK_S = 400.0
"""Maximum seconds until all streams receive tokens again."""

RETRY_S = 0.2

CUT, PAUSE = "streams cut at a kill", "longest time without a token at a kill"
"""Measurements; in the second, a client repeats its request if its stream is cut."""

WITHIN, ELSEWHERE = "longest pause of a stream at a kill", "pause of other streams"
"""Measurements between two tokens of a stream. The second is for the streams on other
replicas, as a multiple of the usual time for a token."""

CALM = "no kill"
"""Contender: pauses in the seconds before a kill, which prompts cause."""

FIRST = "time to first token"
"""Measurement of new prompts while the service is idle."""

FIRSTS = 12
"""Number of new prompts in the measurement ``FIRST``."""

SETTLED_S = 2.0
"""Seconds after a kill within which streams end if they are cut."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


def run(options: Options, on_step: OnStep) -> None:
    """Kill workers of each contender while streams run."""
    # Raises RuntimeError if a stream of ours was cut or has another token, and
    # TimeoutError if streams did not recover.
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    kills = 2 if options.is_quick else KILLS
    with tempfile.TemporaryDirectory() as name:
        on_step(("step", (0.0, f"starting {OURS}")))
        with services.running(_spec(folder), Path(name)) as url:
            service = Service(None, Path(name) / "state")
            for streams in (ALONE, STREAMS):
                load = Load(f"{url}/v1/completions", "m", streams, checks=True)
                total = kills * options.rounds
                asyncio.run(_ours(load, service, total, on_step))
    if VLLM in options.apart:
        python = python_of(VLLM, Path(options.environments))
        with tempfile.TemporaryDirectory() as name:
            for _ in range(min(THEIR_KILLS, options.rounds)):
                asyncio.run(_theirs(python, folder, Path(name), on_step))


def _spec(folder: Path) -> dict[str, Any]:
    stages: list[dict[str, Any]] = [{"name": "front"}, {"name": "middle"}]
    stages[1]["replicas"] = 2
    model = {
        "path": str(folder),
        "generation": {"dtype": "bfloat16", "deterministic": True},
        "deadline_s": 300.0,
        "stages": [*stages, {"name": "back"}],
    }
    return {"app": "bench", "models": {"m": model}, "gateway": {"port": 0}}


def _request(model: str, draw: random.Random, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": [draw.randrange(100, 40_000) for _ in range(PROMPT)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


@dataclass(slots=True)
class Load:
    """Streams that run all the time.

    Attributes:
        url: URL to post to.
        model: Name of the model there.
        streams: Number of streams.
        checks: Whether to compare streams with the first one of the same prompt.
        last_at: Time of each client's last token, on the monotonic clock.
        longest_s: Each client's longest time without a token since ``reset``.
        within_s: Each client's longest time between two tokens of one stream, as above.
        gaps_s: All times between two tokens of one stream since ``reset``.
        cut: Number of streams that ended early.
        different: Number of streams that differ from the first one of their prompt.
        whole: Number of complete streams.
    """

    url: str
    model: str
    streams: int
    checks: bool
    last_at: list[float] = field(init=False)
    longest_s: list[float] = field(init=False)
    within_s: list[float] = field(init=False)
    gaps_s: list[float] = field(init=False)
    cut: int = 0
    different: int = 0
    whole: int = 0
    _wanted: dict[int, list[int]] = field(default_factory=dict)
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.last_at = [0.0] * self.streams
        self.reset()

    def reset(self) -> None:
        """Forget the times between tokens."""
        self.longest_s = [0.0] * self.streams
        self.within_s = [0.0] * self.streams
        self.gaps_s = []

    async def run(self) -> None:
        """Stream until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as http:
            await asyncio.gather(*(self._slot(http, k) for k in range(self.streams)))

    async def _slot(self, http: aiohttp.ClientSession, slot: int) -> None:
        while True:
            began, before = time.monotonic(), self.last_at[slot]
            try:
                await self._stream(http, slot)
            except (aiohttp.ClientError, TimeoutError, EOFError):
                # Count a stream as cut only if it had tokens: a refused one was never
                # accepted.
                self.cut += self.last_at[slot] > max(began, before)
                await asyncio.sleep(RETRY_S)

    async def _stream(self, http: aiohttp.ClientSession, slot: int) -> None:
        """Read one stream; EOFError if it ends early."""
        body = _request(self.model, random.Random(slot), ANSWER)
        tokens: list[int] = []
        async with http.post(self.url, json=body, raise_for_status=True) as found:
            async for line in found.content:
                if not line.startswith(b"data: {"):
                    continue
                is_first = not tokens
                for choice in json.loads(line[6:]).get("choices", ()):
                    tokens += choice.get("token_ids") or ()
                self._arrived(slot, is_first)
        if len(tokens) != ANSWER:
            raise EOFError(f"{len(tokens)} tokens")
        self.whole += 1
        self._grown.set()
        if self.checks and tokens != self._wanted.setdefault(slot, tokens):
            self.different += 1

    def _arrived(self, slot: int, is_first: bool) -> None:
        now = time.monotonic()
        waited_s = now - (self.last_at[slot] or now)
        self.last_at[slot] = now
        self.longest_s[slot] = max(self.longest_s[slot], waited_s)
        if not is_first:
            self.within_s[slot] = max(self.within_s[slot], waited_s)
            self.gaps_s.append(waited_s)
        self._grown.set()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until ``done()``, checked at every token and end, at most ``BACK_S``."""
        async with asyncio.timeout(BACK_S):
            while not done():
                self._grown.clear()
                await self._grown.wait()

    def is_flowing(self, since: float) -> bool:
        """Return whether every client has received a token after ``since``."""
        return min(self.last_at) > since


async def _ours(load: Load, service: Service, kills: int, on_step: OnStep) -> None:
    """Kill our replicas while streams run; RuntimeError if one is cut or differs."""
    draw = random.Random(1)
    if load.streams == ALONE:
        await asyncio.to_thread(wait_whole, service)
        for seed in range(FIRSTS):
            first_s = await asyncio.to_thread(_first_s, load, seed)
            on_step(("sample", (FIRST, ALONE, OURS, "ms", 1000 * first_s)))
    async with _flowing(load):
        for number in range(kills):
            text = f"{OURS}, {load.streams} streams, kill {number + 1} of {kills}"
            on_step(("step", (number / kills, text)))
            await asyncio.to_thread(wait_whole, service)
            load.reset()
            await asyncio.sleep(draw.uniform(*BETWEEN_S))
            victim, streams = await asyncio.to_thread(victim_of, service, draw)
            token_s, calm_s = statistics.median(load.gaps_s), sorted(load.within_s)
            await _kill(load, victim, OURS, on_step)
            worst_s = sorted(load.within_s)
            sample = (WITHIN, load.streams, OURS, "ms", 1000 * worst_s[-1])
            on_step(("sample", sample))
            if 0 < streams < load.streams:
                last = load.streams - streams - 1
                for who, waited_s in ((CALM, calm_s), (OURS, worst_s)):
                    steps = waited_s[last] / token_s
                    on_step(("sample", (ELSEWHERE, STREAMS, who, "steps", steps)))
    if load.cut or load.different:
        texts = f"{load.cut} streams were cut, {load.different} have other tokens"
        raise RuntimeError(texts)


def victim_of(service: Service, draw: random.Random) -> tuple[int, int]:
    """Return the PID of a replica that has streams, and their number."""
    limit = time.monotonic() + BACK_S
    while time.monotonic() < limit:
        status = service.ask("GET", "/status", StatusAnswer, params={"reports": True})
        found = []
        for process in status.processes:
            report = status.worker_report(process.name)
            if process.model and process.pid and report and report.computing:
                found.append((process.pid, report.computing))
        if found:
            return draw.choice(found)
    raise TimeoutError("no replica has a stream")


def _first_s(load: Load, seed: int) -> float:
    """Return the time to the first token of a new prompt, in seconds."""
    body = _request(load.model, random.Random(f"first {seed}"), 2)
    began = time.monotonic()
    with httpx.stream("POST", load.url, json=body, timeout=BACK_S) as found:
        for line in found.iter_lines():
            if line.startswith("data: {"):
                return time.monotonic() - began
    raise RuntimeError("no token arrived")


async def _theirs(python: Path, folder: Path, scratch: Path, on_step: OnStep) -> None:
    """Kill vLLM's worker once; restart its server when it has exited."""
    on_step(("step", (0.0, f"starting {VLLM} (may take minutes)")))
    first = others.running(VLLM, python, folder, scratch, "bfloat16")
    with contextlib.ExitStack() as stack:
        url, process = stack.enter_context(first)
        load = Load(f"{url}/v1/completions", str(folder), STREAMS, checks=False)

        def again() -> str:
            process.wait(BACK_S)
            other = others.running(VLLM, python, folder, scratch, "bfloat16")
            return stack.enter_context(other)[0]

        async def supervise() -> None:
            load.url = f"{await asyncio.to_thread(again)}/v1/completions"

        async with _flowing(load):
            on_step(("step", (0.0, f"{VLLM}, one kill")))
            supervising = asyncio.create_task(supervise())
            await _kill(load, worker_of(process), VLLM, on_step)
            await supervising


@contextlib.asynccontextmanager
async def _flowing(load: Load) -> Any:
    """Run the streams; enter the block after two complete streams per client."""
    running = asyncio.create_task(load.run())
    try:
        await load.until(lambda: load.whole >= 2 * load.streams)
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _kill(load: Load, pid: int, who: str, on_step: OnStep) -> None:
    cut, began = load.cut, time.monotonic()
    load.reset()
    os.kill(pid, signal.SIGKILL)
    await load.until(lambda: load.is_flowing(began + SETTLED_S))
    share = 100 * (load.cut - cut) / load.streams
    on_step(("sample", (CUT, load.streams, who, "%", share)))
    sample = (PAUSE, load.streams, who, "ms", 1000 * max(load.longest_s))
    on_step(("sample", sample))


def worker_of(process: subprocess.Popen[bytes]) -> int:
    """Return the PID of the computing process of a vLLM server: its largest one."""
    children = psutil.Process(process.pid).children(recursive=True)
    biggest = max(children, key=lambda child: child.memory_info().rss)
    return int(biggest.pid)


def _status(service: Service) -> StatusAnswer:
    return service.ask("GET", "/status", StatusAnswer)


def wait_whole(service: Service) -> None:
    """Wait until every stage has its replicas."""
    limit = time.monotonic() + BACK_S
    while not _status(service).is_ready:
        if time.monotonic() > limit:
            raise RuntimeError(
                f"the service did not reach full capacity within {BACK_S:g} s"
            )
        time.sleep(0.1)
