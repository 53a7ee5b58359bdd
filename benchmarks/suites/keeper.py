"""Suite "keeper": cost of the stream keeper.

A service with a keeper and one without are measured alternately: requests to one empty
stage, streams of SmolLM2 in int8, and idle connections. All processes of a service are
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.members import Options, Step
from benchmarks.serving.clients import ask
from benchmarks.serving.services import EMPTY, NUMBER, Service, family_of, running
from benchmarks.serving.streams import drawn, times_of
from multiworld.demo import smollm2

BASELINE = "without"
KEPT = {"with": True, BASELINE: False}
"""Values of `gateway.keeper`, by contender."""

CLIENTS = (1, 32)
STREAMS = (1, 16)
PROMPT, ANSWER = 16, 64
"""Tokens of a stream's prompt and answer."""

CONNECTIONS = 500
"""Number of idle connections."""

SECONDS, QUICK_S = 4.0, 0.5
"""Seconds of one measurement, and of a quick one."""

PARTS = {"keeper": "multiworld.serve.keeper.process", "gateway": "gateway"}
"""Words in the command lines of the processes that keep streams."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


@dataclass(frozen=True, slots=True)
class Running:
    """A service, and where it is."""

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


def run(options: Options, on_step: OnStep) -> None:
    """Measure requests, streams and idle connections, one after the other."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    empty: dict[str, Any] = {
        "factory": "benchmarks.serving.models:empty",
        "stages": [{"max_batch_size": 64}],
    }
    text: dict[str, Any] = {
        "path": str(folder),
        "generation": {"quantization": "int8", "kv_cache_memory_mb": 256},
        "stages": [{}],
    }
    seconds = QUICK_S if options.is_quick else SECONDS
    for model, measure in ((empty, _requests), (text, _streams)):
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            services = {}
            for contender, is_kept in KEPT.items():
                state = Path(name) / contender
                state.mkdir()
                spec = {
                    "app": "bench",
                    "models": {EMPTY: model},
                    "gateway": {"port": 0, "keeper": is_kept},
                }
                url = stack.enter_context(running(spec, state))
                services[contender] = Running(url, state / "state")
            asyncio.run(measure(services, options, seconds, on_step))


def _order(number: int) -> list[str]:
    return list(KEPT) if number % 2 else list(KEPT)[::-1]


def _report(
    before: dict[str, float],
    after: dict[str, float],
    contender: str,
    size: int,
    count: float,
    what: str,
    on_step: OnStep,
) -> None:
    for part, then in before.items():
        used = (after[part] - then) / count
        kind = f"processor time {what}: {part}"
        on_step(("sample", (kind, size, contender, "us", used)))


async def _requests(
    services: dict[str, Running], options: Options, seconds: float, on_step: OnStep
) -> None:
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
                for name in _order(number):
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
                    _report(before, after, name, clients, count, "a request", on_step)
    for number in range(options.rounds):
        on_step(("step", (0.5, "idle connections")))
        for name in _order(number):
            await _idle(services[name], name, seconds, on_step)


async def _idle(service: Running, name: str, seconds: float, on_step: OnStep) -> None:
    """Report the processor time per second and idle connection."""

    async def used() -> dict[str, float]:
        before, began = service.cpu_us(), time.monotonic()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began
        after = service.cpu_us()
        return {part: (after[part] - before[part]) / took_s for part in before}

    host, _, port = service.url.removeprefix("http://").partition(":")
    without = await used()
    opened = [
        await asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS)
    ]
    try:
        body = json.dumps(NUMBER).encode()
        head = f"POST /v2/models/{EMPTY}/infer HTTP/1.1\r\nhost: x\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        for reader, writer in opened:  # so that each has been served once
            writer.write(head.encode() + body)
            await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(min(1.0, seconds))
        loaded = await used()
    finally:
        for _, writer in opened:
            writer.close()
    zero = dict.fromkeys(without, 0.0)
    more = {part: max(0.0, loaded[part] - without[part]) for part in loaded}
    what = "a second of an idle connection"
    _report(zero, more, name, CONNECTIONS, CONNECTIONS, what, on_step)


async def _streams(
    services: dict[str, Running], options: Options, seconds: float, on_step: OnStep
) -> None:
    draw = random.Random(0)
    answer = max(8, int(ANSWER * seconds / SECONDS))
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
            for streams in STREAMS:
                for name in _order(number):
                    before = services[name].cpu_us()
                    rate = await generate(services[name].url, streams)
                    after = services[name].cpu_us()
                    kind = "rate by streams"
                    on_step(("sample", (kind, streams, name, "tokens/s", rate)))
                    _report(
                        before,
                        after,
                        name,
                        streams,
                        streams * answer,
                        "a token",
                        on_step,
                    )
