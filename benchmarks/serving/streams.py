"""Streams whose tokens are timed."""

from __future__ import annotations

import json
import random
import time

import aiohttp


def drawn(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(100, 40_000) for _ in range(count)]


async def times_of(
    http: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    answer: int,
    *,
    model: str = "m",
    key: str = "",
) -> list[float]:
    """Run one stream; return the seconds from its request to each of its chunks."""
    # Raises RuntimeError if the stream did not have ``answer`` tokens. ``key``: key of
    # the tenant, if any.
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    began, made = time.perf_counter(), 0
    times: list[float] = []
    where = f"{url}/v1/completions"
    async with http.post(where, json=body, headers=headers) as found:
        async for line in found.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("choices"):
                times.append(time.perf_counter() - began)
            if chunk.get("usage"):
                made = chunk["usage"]["completion_tokens"]
    if made != answer:
        raise RuntimeError(f"{url} made {made} of {answer} tokens")
    return times
