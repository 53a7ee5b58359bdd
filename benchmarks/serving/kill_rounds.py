"""Streams of every kind while computing processes are killed, in rounds.

A greedy, a sampled, a penalised and a structured stream, and one with two choices, run
at the same time. Their tokens are compared with those of undisturbed streams of the
same serving stack (a *front*). Rounds without a kill show how often the tokens of a
front differ by themselves.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.members import Step

PROMPT, ANSWER = 64, 80
"""Tokens of a prompt, and of an answer."""

DELAY_S = (0.5, 3.0)
"""Minimum and maximum seconds from the start of the streams to a kill."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 50, "seed": 7},
    "penalised": {
        "temperature": 0.9,
        "seed": 3,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
    },
    "structured": {
        "temperature": 0.8,
        "seed": 5,
        "structured_outputs": {"regex": "([a-z]{3,7} ){40}"},
    },
    "two choices": {"temperature": 0.9, "seed": 11, "n": 2},
}

CUT, WRONG = "streams cut by a kill", "tokens wrong or missing"
CONTROL = "tokens different though nothing was killed"
PAUSE, TOKEN = "longest pause of a stream at a kill", "time for a token"
"""Measurements; CONTROL and TOKEN are without kills."""

CALM = "longest pause of a stream, undisturbed, in tokens"
MOVED = "longest pause of a stream at a planned move, in tokens"
MOVED_WRONG = "tokens wrong or missing at a planned move"
"""Measurements; a pause is a multiple of the stream's usual time for a token."""

OF_TOKENS = {"return_token_ids": True, "ignore_eos": True}
"""vLLM's fields; servers that return only text may not know them."""

TIMEOUT_S = 300.0
"""Maximum seconds of a stream."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


@dataclass(slots=True)
class Text:
    """Tokens that the client of one stream has received, and their times.

    Attributes:
        tokens: Tokens by choice.
        gaps_s: Seconds between two events of a choice.
        is_cut: Whether the stream ended early.
        last_at: Time of the last event of each choice, on the monotonic clock.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    is_cut: bool = False
    last_at: dict[int, float] = field(default_factory=dict)

    def wrong(self, wanted: Text) -> int:
        """Return the number of tokens that are wrong, missing or superfluous."""
        found = 0
        for choice, tokens in wanted.tokens.items():
            mine = self.tokens.get(choice, [])
            pairs = zip(mine, tokens, strict=False)
            found += sum(a != b for a, b in pairs) + abs(len(tokens) - len(mine))
        return found

    def pause(self) -> float:
        """Return the longest pause, as a multiple of the median time for a token."""
        if not self.gaps_s:
            return 0.0
        return max(self.gaps_s) / statistics.median(self.gaps_s)


@dataclass(slots=True)
class Front:
    """A serving stack to measure.

    Attributes:
        urls: URLs of its servers, among which streams are distributed.
        model: Name of the model there.
        is_proxied: Whether a broken stream is sent to the next server.
        is_text: Whether prompts are text, and characters are compared, not tokens.
        kinds: Kinds of requests to send.
        vocabulary: Token ids of prompts are below this number.
        kill: Kills a computing process.
        heal: Waits until all servers are back.
        move: Removes a replica as planned; None if the front cannot do that.
        undo_move: Adds the replica again.
    """

    name: str
    urls: list[str]
    model: str
    kill: Callable[[], Awaitable[None]]
    heal: Callable[[], Awaitable[None]]
    move: Callable[[], Awaitable[None]] | None = None
    undo_move: Callable[[], Awaitable[None]] | None = None
    is_proxied: bool = False
    is_text: bool = False
    kinds: tuple[str, ...] = tuple(KINDS)
    vocabulary: int = 40_000


async def measure(
    fronts: list[Front], rounds: int, draw: random.Random, on_step: OnStep
) -> None:
    """Measure fronts: undisturbed, without kills, and with a kill in each round."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for front in fronts:
            await _round(http, front)  # the first round only warms up
            wanted = await _round(http, front)
            token_s = statistics.median(s for t in wanted.values() for s in t.gaps_s)
            on_step(
                ("sample", (TOKEN, len(front.kinds), front.name, "ms", 1000 * token_s))
            )
            for _ in range(rounds):
                found = await _round(http, front)
                calm = max(one.pause() for one in found.values())
                on_step(("sample", (CALM, len(front.kinds), front.name, "", calm)))
                for kind, one in found.items():
                    different = float(one.wrong(wanted[kind]))
                    name = f"{CONTROL}: {kind}"
                    on_step(("sample", (name, 1, front.name, "", different)))
            for number in range(rounds):
                text = f"{front.name}, kill {number + 1} of {rounds}"
                on_step(("step", (number / rounds, text)))
                found = await _round(http, front, draw.uniform(*DELAY_S), front.kill)
                for kind, one in found.items():
                    cut, wrong = int(one.is_cut), one.wrong(wanted[kind])
                    for what, value in ((CUT, cut), (WRONG, wrong)):
                        name = f"{what}: {kind}"
                        on_step(("sample", (name, 1, front.name, "", float(value))))
                longest_s = max(max(one.gaps_s, default=0.0) for one in found.values())
                sample = (PAUSE, len(front.kinds), front.name, "ms", 1000 * longest_s)
                on_step(("sample", sample))
                await front.heal()
            await _measure_moves(http, front, wanted, rounds, draw, on_step)


async def _measure_moves(
    http: aiohttp.ClientSession,
    front: Front,
    wanted: dict[str, Text],
    rounds: int,
    draw: random.Random,
    on_step: OnStep,
) -> None:
    if front.move is None or front.undo_move is None:
        return
    for number in range(rounds):
        text = f"{front.name}, planned move {number + 1} of {rounds}"
        on_step(("step", (number / rounds, text)))
        found = await _round(http, front, draw.uniform(*DELAY_S), front.move)
        for kind, one in found.items():
            wrong = float(one.wrong(wanted[kind]))
            name = f"{MOVED_WRONG}: {kind}"
            on_step(("sample", (name, 1, front.name, "", wrong)))
        longest = max(one.pause() for one in found.values())
        on_step(("sample", (MOVED, len(front.kinds), front.name, "", longest)))
        await front.undo_move()


async def _round(
    http: aiohttp.ClientSession,
    front: Front,
    after_s: float = 0.0,
    disturb: Callable[[], Awaitable[None]] | None = None,
) -> dict[str, Text]:
    """Run one stream of each kind at once; return what their clients received."""
    tasks = {
        kind: asyncio.ensure_future(_stream(http, front, place, kind))
        for place, kind in enumerate(front.kinds)
    }
    if disturb is not None:
        await asyncio.sleep(after_s)
        await disturb()
    return {kind: await task for kind, task in tasks.items()}


async def _stream(
    http: aiohttp.ClientSession, front: Front, place: int, kind: str
) -> Text:
    text, draw = Text(), random.Random(kind)
    prompt = [draw.randrange(100, front.vocabulary) for _ in range(PROMPT)]
    words = " ".join(f"{kind} {number:x}" for number in prompt[: PROMPT // 4])
    urls = front.urls[place % len(front.urls) :] + front.urls
    for url in urls[: 3 if front.is_proxied else 1]:
        made = text.tokens.get(0, [])
        body = {
            "model": front.model,
            "prompt": words if front.is_text else prompt + made,
            "max_tokens": ANSWER - len(made),
            "stream": True,
            **({} if front.is_text else OF_TOKENS),
            **KINDS[kind],
        }
        if kind == "structured":
            body.pop("ignore_eos", None)
        if text.tokens and "n" in body:
            break  # a request for several choices cannot continue as one prompt
        try:
            await _read(http, f"{url}/v1/completions", body, text)
            return text
        except (aiohttp.ClientError, TimeoutError, EOFError):
            continue
    text.is_cut = True
    return text


async def _read(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], text: Text
) -> None:
    """Append the tokens of an answer; EOFError if it ends early."""
    async with http.post(url, json=body, raise_for_status=True) as answer:
        async for line in answer.content:
            if line.startswith(b"data: [DONE]"):
                return
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise EOFError(str(event["error"]))
            now = time.monotonic()
            for choice in event.get("choices", ()):
                if choice["index"] in text.last_at:
                    text.gaps_s.append(now - text.last_at[choice["index"]])
                text.last_at[choice["index"]] = now
                tokens = choice.get("token_ids")
                if tokens is None:
                    tokens = [*map(ord, choice.get("text") or "")]
                text.tokens.setdefault(choice["index"], []).extend(tokens)
    raise EOFError("no end")
