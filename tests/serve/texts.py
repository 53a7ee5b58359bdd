"""Services that generate text, and their clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.serve.harness import WAIT_S, Served

PROMPT = [ord(letter) - 32 for letter in "Once upon a time"]
COUNT = 24
STAGES = ("front", "middle", "back")


def spec_of(folder: Path, **changes: Any) -> dict[str, Any]:
    model = {
        "path": str(folder),
        "generation": {"max_num_batched_tokens": 64, "kv_cache_memory_mb": 1},
        "deadline_s": 60.0,
        "stages": [{"name": name} for name in STAGES],
        **changes,
    }
    model["stages"][1]["replicas"] = 2
    return {
        "app": "generates",
        "models": {"m": model},
        "gateway": {"port": 0},
        "orphan_s": 2.0,
    }


@contextlib.asynccontextmanager
async def client(service: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return OpenAI's own client, without retries."""
    made = openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    )
    async with made:
        yield made


def asked(count: int = COUNT, **more: Any) -> dict[str, Any]:
    """Return a request whose answer shows every token by its id."""
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    wanted = {"model": "m", "prompt": PROMPT, "max_tokens": count, "temperature": 0.0}
    return {**wanted, "logprobs": 0, "extra_body": extra, **more}


def undisturbed(service: Served) -> list[str]:
    """Return the texts of the tokens of an undisturbed stream."""
    body = asked()
    body |= body.pop("extra_body")
    answer = post(service, "/v1/completions", body).json()
    found: list[str] = answer["choices"][0]["logprobs"]["tokens"]
    return found


class Stream:
    """A stream of a completion; ``pieces`` are the texts of its tokens so far."""

    def __init__(self, client: openai.AsyncOpenAI, count: int = COUNT) -> None:
        self.pieces: list[str] = []
        self.finish: str | None = None
        self._grown = asyncio.Event()
        self._task = asyncio.ensure_future(self._read(client, count))

    async def _read(self, client: openai.AsyncOpenAI, count: int) -> None:
        stream: Any = await client.completions.create(**asked(count), stream=True)
        async for chunk in stream:
            (choice,) = chunk.choices
            assert self.finish is None, "nothing comes after the end"
            self.pieces += choice.logprobs.tokens
            self.finish = choice.finish_reason
            self._grown.set()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.pieces) < count and not self._task.done():
                self._grown.clear()
                await self._grown.wait()

    async def end(self) -> list[str]:
        await self._task
        return self.pieces


def post(service: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{service.url}{path}", json=body, timeout=WAIT_S)


async def is_whole(service: Served) -> None:
    await asyncio.to_thread(
        service.until, lambda: service.stages() == [1, 2, 1], "whole"
    )
