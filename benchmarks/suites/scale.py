"""Suite "scale": what a token, a loss and a stream cost as a service grows.

The engines compute nothing, so only the service's own work is measured. Each engine has
ten streams, and there are two gateways. At each size, a replica is killed, and every
token is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from benchmarks.members import Options, Step
from benchmarks.serving.paced_engine import STEP_S, token_at
from benchmarks.serving.services import family_of, pids_of, running
from benchmarks.serving.streams import drawn
from multiworld.demo import smollm2
from multiworld.serve.controller.answers import StatusAnswer
from multiworld.serve.controller.client import Service

SIZES, QUICK = (10, 50, 100, 200), (2, 4)
"""Numbers of replicas."""

STREAMS = 10
"""Number of streams at a replica."""

BEGINNINGS = 100
"""Number of streams that begin in a second."""

PROMPT = 16
"""Tokens of a prompt."""

PACE_S, QUICK_PACE_S = 1.0, 0.2
"""Seconds of an engine's step."""

SECONDS, QUICK_S = 10.0, 1.0
"""Seconds of one measurement, and of a quick one."""

LIMIT_S = 120.0
"""Maximum seconds for all streams to run, and for a lost replica to be replaced."""

HEAL_S = 5.0
"""Seconds in which the loss of a replica is handled and its replacement starts."""

LONG = 8_000
"""Tokens of an answer: more than are ever read."""

PARTS = ("gateways", "keeper", "replicas", "controller")
"""What the processes of a service do, in the order of the tables."""

REPLICA = "m/"
"""Start of the names of replicas."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


def parts_of(state: Path) -> dict[int, str]:
    """Return what each process of a service does, by PID."""
    found = dict.fromkeys(pids_of(state, REPLICA), "replicas")
    found |= dict.fromkeys(pids_of(state, "gateway"), "gateways")
    for pid in family_of(state):
        if pid in found:
            continue
        with contextlib.suppress(psutil.Error):
            command = " ".join(psutil.Process(pid).cmdline())
            is_keeper = "serve.keeper.process" in command
            found[pid] = "keeper" if is_keeper else "controller"
    return found


def used_s(parts: dict[int, str]) -> dict[str, float]:
    """Return the seconds of processor time so far, by part; without lost processes."""
    used = dict.fromkeys(PARTS, 0.0)
    for pid, part in parts.items():
        with contextlib.suppress(OSError):
            for each in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                used[part] += int(each.read_text().split()[0]) / 1e9
    return used


def resident_kib(parts: dict[int, str]) -> dict[str, float]:
    """Return the KiB of memory that processes do not share, by part."""
    found = dict.fromkeys(PARTS, 0.0)
    for pid, part in parts.items():
        with contextlib.suppress(psutil.Error):
            found[part] += psutil.Process(pid).memory_full_info().uss / 1024
    return found


@dataclass
class Streams:
    """Streams that run until they are cancelled, and their results.

    Attributes:
        tokens: Tokens received so far, by all streams.
        started: Streams that have a token.
        wrong: Tokens that are not those of an undisturbed stream.
        cut: Streams that ended.
        longest_s: The longest time between two events of a stream since ``reset``.
    """

    url: str
    tokens: int = 0
    started: int = 0
    wrong: int = 0
    cut: int = 0
    longest_s: float = 0.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def add(self, http: aiohttp.ClientSession, prompt: list[int]) -> None:
        self.tasks.append(asyncio.ensure_future(self._read(http, prompt)))

    async def _read(self, http: aiohttp.ClientSession, prompt: list[int]) -> None:
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": LONG,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        index, last = 0, 0.0
        async with http.post(f"{self.url}/v1/completions", json=body) as found:
            found.raise_for_status()
            async for line in found.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                self.started += not index
                if index:
                    self.longest_s = max(self.longest_s, now - last)
                last = now
                for choice in json.loads(line[6:])["choices"]:
                    for token in choice["token_ids"]:
                        self.wrong += token != token_at(prompt, index)
                        index += 1
                        self.tokens += 1
        self.cut += 1

    async def until_started(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while self.started < count:
                done, _ = await asyncio.wait(self.tasks, timeout=0.1)
                for task in done:
                    task.result()

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def run(options: Options, on_step: OnStep) -> None:
    """Measure services of each size, one after the other."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    sizes = QUICK if options.is_quick else SIZES
    for at, size in enumerate(sizes):
        on_step(("step", (at / len(sizes), f"{size} replicas")))
        spec = {
            "app": "scale",
            "models": {
                "m": {
                    "path": str(folder),
                    "engine": "benchmarks.serving.paced_engine:PacedEngine",
                    "engine_args": {
                        STEP_S: QUICK_PACE_S if options.is_quick else PACE_S
                    },
                    "generation": {"max_num_seqs": 4 * STREAMS},
                    "replicas": size,
                    "deadline_s": 3600.0,
                }
            },
            "gateway": {"port": 0, "replicas": 2, "max_connections": 8 * 1024},
        }
        with tempfile.TemporaryDirectory() as name:
            began = time.monotonic()
            with running(spec, Path(name)) as url:
                took_s = time.monotonic() - began
                on_step(("sample", ("start", size, "service", "s", took_s)))
                state = Path(name) / "state"
                asyncio.run(_measure(url, state, size, options, on_step))


async def _measure(
    url: str, state: Path, size: int, options: Options, on_step: OnStep
) -> None:
    seconds = QUICK_S if options.is_quick else SECONDS
    draw = random.Random(size)
    parts = parts_of(state)
    empty = resident_kib(parts)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)

    def sample(kind: str, contender: str, unit: str, value: float) -> None:
        on_step(("sample", (kind, size, contender, unit, value)))

    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        idle = await _used(parts, seconds)
        for part, each in idle.items():
            sample("processor time a second without streams", part, "ms", 1e3 * each)
        streams = Streams(url)
        try:
            for _ in range(size * STREAMS):
                streams.add(http, drawn(draw, PROMPT))
                await asyncio.sleep(1 / BEGINNINGS)
            await streams.until_started(size * STREAMS)
            for number in range(options.rounds):
                before = streams.tokens
                used = await _used(parts, seconds)
                made = (streams.tokens - before) / seconds
                for part, each in used.items():
                    more = max(0.0, each - idle[part]) / made
                    sample("processor time a token", part, "us", 1e6 * more)
                if not number:
                    held = resident_kib(parts)
                    for part in ("gateways", "keeper"):
                        more = (held[part] - empty[part]) / (size * STREAMS)
                        sample("memory a stream", part, "KiB", max(0.0, more))
                await _lose(streams, state, parts, used, size, sample)
                parts = parts_of(state)
            sample("streams cut", "service", "", streams.cut)
            sample("tokens wrong", "service", "", streams.wrong)
        finally:
            await streams.end()


async def _used(parts: dict[int, str], seconds: float) -> dict[str, float]:
    """Return the seconds of processor time in a second, by part."""
    before, began = used_s(parts), time.monotonic()
    await asyncio.sleep(seconds)
    took_s = time.monotonic() - began
    return {part: (now - before[part]) / took_s for part, now in used_s(parts).items()}


async def _lose(
    streams: Streams,
    state: Path,
    parts: dict[int, str],
    usual: dict[str, float],
    size: int,
    sample: Callable[[str, str, str, float], None],
) -> None:
    """Kill a replica, and report what its loss and its replacement take."""
    victim = pids_of(state, REPLICA)[0]
    others = {pid: part for pid, part in parts.items() if pid != victim}
    before, began = used_s(others), time.monotonic()
    streams.longest_s = 0.0
    os.kill(victim, signal.SIGKILL)
    # Do not ask for the status meanwhile: its processor time would be counted.
    await asyncio.sleep(HEAL_S)
    took_s = time.monotonic() - began
    for part, now in used_s(others).items():
        more = now - before[part] - usual[part] * took_s
        sample("processor time a loss", part, "ms", 1e3 * max(0.0, more))
    sample("longest pause of a stream at a loss", "service", "s", streams.longest_s)
    service = Service(None, state)
    async with asyncio.timeout(LIMIT_S):
        while await asyncio.to_thread(_ready, service) < size:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


def _ready(service: Service) -> int:
    found = service.ask("GET", "/status", StatusAnswer).processes
    return sum(bool(each.model) and each.phase == "ready" for each in found)
