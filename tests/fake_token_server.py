"""Small server that samples continuations itself, for tests of adapters."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from tests.fake_vllm import (
    BROKEN,
    DIE,
    EARLY,
    FLOOD,
    FOREIGN,
    GARBAGE,
    HANG,
    HUGE,
    REFUSE,
    STEP_S,
    logits_of,
)

SPOILT = 249
"""First token of prompts that are continued differently each time."""
PARTS = 4
"""Tokens that are multiples of this number end within a character.

llama.cpp sends no log-probabilities for them.
"""


def interpreter(folder: Path, *flags: str) -> Path:
    """Write a program that runs this server, whatever file it is given."""
    path = folder / f"fake-llama{'-'.join(('', *flags)).replace('/', '')}"
    line = f"-m tests.fake_token_server {' '.join(flags)}"
    root = Path(__file__).resolve().parents[1]
    path.write_text(
        f'#!/bin/sh\nshift 2\ncd {root}\nexec {sys.executable} {line} "$@"\n'
    )
    path.chmod(0o755)
    return path


def adapter_of(body: dict[str, Any]) -> str:
    numbers = [str(one["id"]) for one in body.get("lora", ()) if one["scale"] == 1.0]
    named = body.get("model", "")
    return "".join(numbers) or (named if named != "fake" else "")


class Sampler:
    def __init__(self, body: dict[str, Any], prompt: list[int]) -> None:
        self._body, self._draw = body, random.Random(body.get("seed"))
        self.tokens = list(prompt)
        self.made: list[int] = []
        if prompt[0] == SPOILT:
            self._draw = random.Random()

    def next(self) -> tuple[int, list[tuple[int, float]]]:
        body = self._body
        logits = logits_of(self.tokens, adapter_of(body))
        scores = [math.log(weight) for weight in softmax(logits)]
        ranked = sorted(enumerate(scores), key=lambda pair: -pair[1])
        bias = body.get("logit_bias") or []
        pairs = bias.items() if isinstance(bias, dict) else bias
        for token, value in pairs:
            logits[int(token)] += -math.inf if value is False else value
        repeat = body.get("repetition_penalty", body.get("repeat_penalty", 1.0))
        for token in set(self.tokens) if repeat != 1.0 else ():
            value = logits[token]
            logits[token] = value / repeat if value > 0 else value * repeat
        for token, times in Counter(self.made).items():
            logits[token] -= body.get("frequency_penalty", 0.0) * times
            logits[token] -= body.get("presence_penalty", 0.0)
        if len(self.made) < body.get("min_tokens", 0):
            for token in body.get("stop_token_ids", ()):
                logits[token] = -math.inf
        token = self._chosen(logits)
        self.tokens.append(token)
        self.made.append(token)
        return token, ranked

    def _chosen(self, logits: list[float]) -> int:
        body = self._body
        temperature = body.get("temperature", 1.0)
        order = sorted(range(len(logits)), key=lambda token: -logits[token])
        if temperature <= 0.0:
            return order[0]
        weights = softmax([logit / temperature for logit in logits])
        least = body.get("min_p", 0.0) * weights[order[0]]
        top_k = body.get("top_k", 0)
        kept, total = [], 0.0
        for token in order[:top_k] if top_k > 0 else order:
            if weights[token] < least:
                break
            kept.append(token)
            total += weights[token]
            if total >= body.get("top_p", 1.0):
                break
        (token,) = self._draw.choices(kept, [weights[t] for t in kept])
        return token


def softmax(logits: list[float]) -> list[float]:
    most = max(logits)
    weights = [math.exp(logit - most) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


class Server:
    """Routes: vLLM's completions, with token ids or as text only, and llama.cpp's."""

    def __init__(self, tokenizer: Tokenizer | None, has_ids: bool) -> None:
        self._tokenizer, self._has_ids = tokenizer, has_ids

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def props(self, request: web.Request) -> web.Response:
        return web.json_response({"total_slots": 9})

    async def _misbehaves(self, kind: int) -> web.Response | None:
        if kind == HANG:
            await asyncio.sleep(600.0)
        if kind in (REFUSE, BROKEN):
            status = 400 if kind == REFUSE else 500
            return web.json_response({"error": {"message": "no"}}, status=status)
        return None

    async def completion(self, request: web.Request) -> web.Response:
        """Return one token, as llama.cpp does."""
        body = await request.json()
        prompt: list[int] = body["prompt"]
        if (refusal := await self._misbehaves(prompt[0])) is not None:
            return refusal
        await asyncio.sleep(STEP_S)
        if prompt[0] == DIE:
            os._exit(9)
        token, ranked = Sampler(body, prompt).next()
        if prompt[0] == FOREIGN:
            token = 10**6
        top = [{"id": t, "logprob": p} for t, p in ranked[: body.get("n_probs", 0)]]
        scores = [{"id": token, "logprob": dict(ranked).get(token, -1.0)}]
        answer = {
            "tokens": [] if prompt[0] == EARLY else [token],
            "completion_probabilities": [{**scores[0], "top_logprobs": top}],
        }
        if token % PARTS == 0:
            del answer["completion_probabilities"]
        text = json.dumps(answer)
        if prompt[0] == GARBAGE:
            text = text[:20]
        if prompt[0] == HUGE:
            text += " " * 20_000_000
        return web.Response(text=text, content_type="application/json")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Stream tokens, or return them, as vLLM does."""
        body = await request.json()
        prompt = body["prompt"]
        if isinstance(prompt, str):
            assert self._tokenizer is not None
            prompt = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        elif not self._has_ids:
            return web.json_response({"error": {"message": "no ids"}}, status=400)
        if body.get("min_tokens", 0) > body["max_tokens"]:  # as vLLM
            return web.json_response({"error": {"message": "min_tokens"}}, status=400)
        kind = prompt[0]
        if (refusal := await self._misbehaves(kind)) is not None:
            return refusal
        sampler = Sampler(body, prompt)
        if not body.get("stream"):
            token, _ = sampler.next()
            choice = {"index": 0, "token_ids": [token]}
            return web.json_response({"choices": [choice]})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while len(sampler.made) < body["max_tokens"] or kind == FLOOD:
            await asyncio.sleep(STEP_S)
            if kind == DIE and len(sampler.made) == 3:
                os._exit(9)
            if kind == EARLY and len(sampler.made) == 3:
                break
            token, ranked = sampler.next()
            data = json.dumps({"choices": [self._choice(token, ranked, body, kind)]})
            if kind == GARBAGE:
                data = data[:20]
            if kind == HUGE:
                data = data + " " * 10_000_000
            await answer.write(f"data: {data}\n\n".encode())
            if token in body.get("stop_token_ids", ()) and kind != FLOOD:
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _choice(
        self,
        token: int,
        ranked: list[tuple[int, float]],
        body: dict[str, Any],
        kind: int,
    ) -> dict[str, Any]:
        if not self._has_ids:
            assert self._tokenizer is not None
            return {"index": 0, "text": self._tokenizer.decode([token])}
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": [10**6 if kind == FOREIGN else token],
        }
        if body.get("logprobs") is not None:
            top = {f"token_id:{t}": p for t, p in ranked[: body["logprobs"]]}
            choice["logprobs"] = {
                "tokens": [f"token_id:{token}"],
                "token_logprobs": [dict(ranked)[token]],
                "top_logprobs": [top],
            }
        return choice


def main(arguments: list[str]) -> None:
    given = dict(itertools.pairwise(arguments))
    path = given.get("--tokenizer")
    tokenizer = Tokenizer.from_file(path) if path else None
    server = Server(tokenizer, "--text" not in arguments)
    app = web.Application()
    routes = [web.get("/health", server.health), web.get("/v1/models", server.models)]
    if "--llama" in arguments:
        routes.append(web.post("/completion", server.completion))
        routes.append(web.get("/props", server.props))
    else:
        routes.append(web.post("/v1/completions", server.completions))
    app.add_routes(routes)
    host = given.get("--host", "127.0.0.1")
    web.run_app(app, host=host, port=int(given["--port"]), print=None)


if __name__ == "__main__":
    main(sys.argv[1:])
