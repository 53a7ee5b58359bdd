"""Chats that stream at the same time, and the arrival time of each token."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PROMPTS = (
    "Tell me a story about a dog who learns to swim.",
    "Explain gravity to a child.",
    "Why is the sky blue?",
    "Write a poem about rain 🌧️ in spring.",
    "How do I cook rice?",
    "¿Qué es un número primo?",
    "Describe the ocean at night.",
    "Who was Ada Lovelace, and what did she do?",
    "What makes a good friend?",
    "Give me three tips for better sleep.",
    "Pourquoi les feuilles tombent-elles en automne ?",
    "How does a bicycle stay upright?",
)
LIMIT_S = 120.0  # seconds that one chat may take


@dataclass(slots=True)
class Chat:
    number: int
    question: str
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # tokens of the answer
    # Time of the question, then of each token's arrival, in seconds since the start.
    times: list[float] = field(default_factory=list)
    text: str = ""  # text of the answer so far
    finish: str = ""  # why it ended; empty while it streams
    error: str = ""  # empty if nothing went wrong

    @property
    def request(self) -> str:
        """Id of the chat's request."""
        return f"chat-{self.number}"

    def pause_after(self, begin_s: float, end_s: float) -> float:
        """Return the longest pause between tokens that overlaps a span of time."""
        pauses = [
            after - before
            for before, after in itertools.pairwise(self.times)
            if after >= begin_s and before <= end_s
        ]
        return max(pauses, default=0.0)


class Chats:
    """Several chats at once; when one ends, the next starts."""

    def __init__(self, url: str, model: str, at_once: int, tokens: int) -> None:
        self._url, self._model, self._tokens = url, model, tokens
        self._at_once = at_once
        self._numbers = itertools.count()
        self._is_ending = False
        self.all: list[Chat] = []
        self.slots: list[Chat | None] = [None] * at_once
        self.began_at = asyncio.get_running_loop().time()  # origin of ``Chat.times``

    def end(self) -> None:
        self._is_ending = True

    async def run(self) -> None:
        """Chat until ``end``; cancelling aborts the chats."""
        timeout = aiohttp.ClientTimeout(total=LIMIT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            slots = (self._slot(session, slot) for slot in range(self._at_once))
            await asyncio.gather(*slots)

    async def _slot(self, session: aiohttp.ClientSession, slot: int) -> None:
        while not self._is_ending:
            number = next(self._numbers)
            chat = Chat(number, PROMPTS[number % len(PROMPTS)])
            self.all.append(chat)
            self.slots[slot] = chat
            try:
                await self._chat(session, chat)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                chat.error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(1.0)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self.began_at

    async def _chat(self, session: aiohttp.ClientSession, chat: Chat) -> None:
        asked = {
            "model": self._model,
            "messages": [{"role": "user", "content": chat.question}],
            "max_tokens": self._tokens,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        chat.times.append(self._now())
        url = f"{self._url}/v1/chat/completions"
        headers = {"X-Request-Id": chat.request}
        async with session.post(url, json=asked, headers=headers) as answer:
            if answer.status != 200:
                chat.error = f"HTTP {answer.status}: {await answer.text()}"
                return
            async for chunk in _chunks(answer):
                if "error" in chunk:
                    chat.error = chunk["error"]["message"]
                    return
                (choice,) = chunk["choices"]
                chat.prompt = choice.get("prompt_token_ids") or chat.prompt
                chat.tokens += choice["token_ids"]
                chat.times += [self._now()] * len(choice["token_ids"])
                chat.text += choice["delta"].get("content") or ""
                chat.finish = choice["finish_reason"] or ""
        if not chat.finish:
            chat.error = "the stream was cut"


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        text = line.strip()
        if text.startswith(b"data: ") and text != b"data: [DONE]":
            yield json.loads(text[6:])
