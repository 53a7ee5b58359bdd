"""An engine that computes nothing: each step lasts as long as ``engine_args`` says."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Sequence

from multiworld.serve.engine.external.whole_engine import (
    EngineSettings,
    EngineToken,
    Run,
)
from multiworld.serve.wire.generation_messages import Sampling

WORDS = 200, 40_000
"""Range of the generated tokens, so that each is some text."""

STEP_S = "step_s"
"""Field of ``engine_args``: seconds of a step, in which each sequence gets a token."""


def token_at(prompt: Sequence[int], index: int) -> int:
    """Return the token at an index of the answer to a prompt."""
    text = " ".join(map(str, (*prompt, index))).encode()
    first, last = WORDS
    return first + zlib.crc32(text) % (last - first)


class PacedEngine:
    """All running sequences get a token at the same time, as in a batch."""

    has_adapters = False
    noise = ""

    def __init__(self, settings: EngineSettings) -> None:
        self._step_s = float(settings.args[STEP_S])
        self._stepped = asyncio.Condition()
        self._steps: asyncio.Task[None] | None = None
        self.usage, self.phase = 0.0, ""

    async def start(self) -> None:
        self._steps = asyncio.ensure_future(self._step())

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            async with self._stepped:
                self._stepped.notify_all()

    def check(self, sampling: Sampling) -> None:
        """Accept everything."""

    async def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        prompt = run.tokens[: run.prompt]
        first = len(run.tokens) - run.prompt
        for index in range(first, first + run.remaining):
            async with self._stepped:
                await self._stepped.wait()
            yield (EngineToken(token_at(prompt, index)),)

    async def wait_lost(self) -> str:
        return str(await asyncio.Event().wait())

    def stopped_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        if self._steps is not None:
            self._steps.cancel()
