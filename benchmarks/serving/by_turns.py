"""Services that differ in one thing, measured alternately: requests and streams.

Processor time is measured for all processes of a service.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.members import Options, Step
from benchmarks.serving.clients import ask
from benchmarks.serving.services import EMPTY, NUMBER, Service, family_of, running
from benchmarks.serving.streams import drawn, times_of

CLIENTS = (1, 32)
STREAMS = (1, 16)
PROMPT, ANSWER = 16, 64
"""Tokens of a stream's prompt and answer."""

SECONDS, QUICK_S = 4.0, 0.5
"""Seconds of one measurement, and of a quick one."""

PARTS = {"keeper": "multiworld.serve.keeper.process", "gateway": "gateway"}
"""Words in the command lines of the processes that keep streams."""

EMPTY_MODEL: dict[str, Any] = {
    "factory": "benchmarks.serving.models:empty",
    "stages": [{"max_batch_size": 64}],
}
"""Model of one stage that computes nothing."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


def text_model(folder: Path) -> dict[str, Any]:
    """Return the model of one stage that generates text in int8."""
    return {
        "path": str(folder),
        "generation": {"quantization": "int8", "kv_cache_memory_mb": 256},
        "stages": [{}],
    }


def seconds_of(options: Options) -> float:
    return QUICK_S if options.is_quick else SECONDS


@dataclass(frozen=True, slots=True)
class Difference:
    """What sets a contender apart: options of its gateway, and its environment."""

    gateway: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """A running service: its URL, and the folder of its state."""

    url: str
    state: Path

    def cpu_us(self) -> dict[str, float]:
        """Return the processor time used so far, by part and for all processes."""
        found = dict.fromkeys((*PARTS, "all"), 0.0)
        for pid in family_of(self.state):
            with contextlib.suppress(psutil.Error, OSError):
                used = _cpu_us(pid)
                command = " ".join(psutil.Process(pid).cmdline())
                found["all"] += used
                for part, word in PARTS.items():
                    if word in command:
                        found[part] += used
                        break
        return found


def _cpu_us(pid: int) -> float:
    """Return the processor time of a process, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(each.read_text().split()[0]) for each in threads) / 1000


@contextlib.contextmanager
def serving(
    model: Mapping[str, Any], contenders: Mapping[str, Difference]
) -> Iterator[dict[str, Running]]:
    """Serve one model once for each contender, all at the same time."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        services = {}
        for contender, difference in contenders.items():
            folder = Path(name) / contender.replace(" ", "")
            folder.mkdir()
            spec = {
                "app": "bench",
                "models": {EMPTY: model},
                "gateway": {"port": 0, **difference.gateway},
            }
            url = stack.enter_context(running(spec, folder, difference.environment))
            services[contender] = Running(url, folder / "state")
        yield services


def order(services: Mapping[str, Running], number: int) -> list[str]:
    """Return the order of the contenders, which is reversed in every other round."""
    return list(services) if number % 2 else list(services)[::-1]


def report(
    before: dict[str, float],
    after: dict[str, float],
    contender: str,
    size: int,
    count: float,
    what: str,
    on_step: OnStep,
) -> None:
    """Report the processor time of each part, divided by ``count``."""
    for part, then in before.items():
        used = (after[part] - then) / count
        kind = f"processor time {what}: {part}"
        on_step(("sample", (kind, size, contender, "us", used)))


async def requests(
    services: Mapping[str, Running], options: Options, on_step: OnStep
) -> None:
    """Measure requests to an empty stage, with few and many clients."""
    seconds = seconds_of(options)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        asked = {
            name: Service(name, EMPTY, f"{each.url}/v2/models/{EMPTY}/infer", NUMBER)
            for name, each in services.items()
        }
        for each in asked.values():
            await ask(http, each, 4, min(1.0, seconds))
        for number in range(options.rounds):
            on_step(("step", (0.5 * number / options.rounds, "requests")))
            for clients in CLIENTS:
                for name in order(services, number):
                    before = services[name].cpu_us()
                    answers = await ask(http, asked[name], clients, seconds)
                    found = {
                        ("rate", "requests/s"): answers.rate,
                        ("p50", "ms"): answers.quantile_ms(0.5),
                        ("p99", "ms"): answers.quantile_ms(0.99),
                    }
                    for (what, unit), value in found.items():
                        kind = f"{what} by clients"
                        on_step(("sample", (kind, clients, name, unit, value)))
                    count = len(answers.latencies_s)
                    after = services[name].cpu_us()
                    report(before, after, name, clients, count, "a request", on_step)


async def streams(
    services: Mapping[str, Running], options: Options, on_step: OnStep
) -> None:
    """Measure streams of generated text, one and many at a time."""
    draw = random.Random(0)
    answer = max(8, int(ANSWER * seconds_of(options) / SECONDS))
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def generate(url: str, count: int) -> float:
            prompts = [drawn(draw, PROMPT) for _ in range(count)]
            began = time.monotonic()
            asked = (
                times_of(http, url, prompt, answer, model=EMPTY) for prompt in prompts
            )
            await asyncio.gather(*asked)
            return count * answer / (time.monotonic() - began)

        for each in services.values():
            await generate(each.url, 2)
        for number in range(options.rounds):
            on_step(("step", (0.6 + 0.4 * number / options.rounds, "streams")))
            for count in STREAMS:
                for name in order(services, number):
                    before = services[name].cpu_us()
                    rate = await generate(services[name].url, count)
                    after = services[name].cpu_us()
                    kind = "rate by streams"
                    on_step(("sample", (kind, count, name, "tokens/s", rate)))
                    made = count * answer
                    report(before, after, name, count, made, "a token", on_step)
