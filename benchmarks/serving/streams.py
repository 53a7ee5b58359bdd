"""Streams of text whose tokens are timed."""

from __future__ import annotations

import json
import random
import time

import aiohttp


def drawn(draw: random.Random, count: int) -> list[int]:
    """Return random tokens of SmolLM2.

    Args:
        draw: Source of random numbers.
        count: Number of tokens.
    """
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
    """Run one stream; return the seconds from its request to each of its chunks.

    Args:
        http: Session to send it with.
        url: URL of a server with OpenAI's interface.
        prompt: Tokens of the prompt.
        answer: Number of tokens to generate.
        model: Name of the model there.
        key: Key of the tenant; empty: none.

    Raises:
        RuntimeError: It had another number of tokens.
    """
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
