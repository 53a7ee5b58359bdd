"""Suite "keeper": cost of the stream keeper, alternating with a service without one.

The load is requests to one empty stage, streams of SmolLM2 in int8, and idle
connections.
"""

from __future__ import annotations

import asyncio
import json
import time

from benchmarks.members import Options
from benchmarks.serving.by_turns import (
    EMPTY_MODEL,
    Difference,
    OnStep,
    Running,
    order,
    report,
    requests,
    seconds_of,
    serving,
    streams,
    text_model,
)
from benchmarks.serving.services import EMPTY, NUMBER
from multiworld.demo import smollm2

BASELINE = "without"
CONTENDERS = {
    "with": Difference({"keeper": True}),
    BASELINE: Difference({"keeper": False}),
}

CONNECTIONS = 500
"""Number of idle connections."""


def run(options: Options, on_step: OnStep) -> None:
    """Measure requests, idle connections and streams, one after the other."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    with serving(EMPTY_MODEL, CONTENDERS) as services:
        asyncio.run(requests(services, options, on_step))
        for number in range(options.rounds):
            on_step(("step", (0.5, "idle connections")))
            for name in order(services, number):
                measured = _idle(services[name], name, seconds_of(options), on_step)
                asyncio.run(measured)
    with serving(text_model(folder), CONTENDERS) as services:
        asyncio.run(streams(services, options, on_step))


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
        for reader, writer in opened:  # each connection must have been served once
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
    report(zero, more, name, CONNECTIONS, CONNECTIONS, what, on_step)
