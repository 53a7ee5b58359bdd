"""Small server with the interface of vLLM's runner V1, for tests of its adapter."""

from __future__ import annotations

import asyncio
import base64
import importlib
import itertools
import json
import math
import os
import random
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

VOCABULARY, HIDDEN = 300, 64

HANG, GARBAGE, FOREIGN, EARLY, REFUSE, BROKEN, FLOOD, DIE, HUGE = range(240, 249)
SHORT, TWICE = 249, 250  # for embeddings
"""First tokens of the prompts for which the server misbehaves."""

STEP_S = float(os.environ.get("FAKE_VLLM_STEP_S", "0.002"))
"""Seconds for a token."""


def interpreter(folder: Path) -> Path:
    """Write a program for ``engine_python`` that runs this server for any module."""
    path = folder / "fake-python"
    path.write_text(
        f'#!/bin/sh\nshift 2\nexec {sys.executable} {Path(__file__).resolve()} "$@"\n'
    )
    path.chmod(0o755)
    return path


def adapter(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text('{"r": 8}')
    return path


def logits_of(tokens: list[int], adapter: str = "") -> list[float]:
    """Return logits that depend on all tokens, and on the adapter."""
    draw = random.Random(f"{tokens!r}{adapter}")
    return [draw.gauss(0.0, 2.0) for _ in range(VOCABULARY)]


def scores_of(tokens: list[int], adapter: str) -> dict[int, float]:
    logits = logits_of(tokens, adapter)
    total = math.log(sum(map(math.exp, logits)))
    return {token: logit - total for token, logit in enumerate(logits)}


def vector_of(ids: list[int]) -> bytes:
    draw = random.Random(repr(ids))
    return struct.pack(f"<{HIDDEN}f", *(draw.gauss(0.0, 1.0) for _ in range(HIDDEN)))


class Sampling:
    """The real logits processor, loaded as vLLM loads it, for single sequences."""

    def __init__(self, name: str) -> None:
        import torch  # as the processor does; it takes seconds

        torch.set_num_threads(1)
        self._tensor = torch.tensor
        module, _, kind = name.partition(":")
        made = getattr(importlib.import_module(module), kind)
        assert "multiworld" not in sys.modules, "vLLM must not import the package"
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=False),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        )
        self._processor = made(config, torch.device("cpu"), False)

    def next(
        self, asked: dict[str, Any], tokens: list[int], made: list[int], adapter: str
    ) -> int:
        params = SimpleNamespace(extra_args=asked.get("extra_args"))
        added = [(0, params, tokens, made)]
        update = SimpleNamespace(removed=[0], added=added, moved=[])
        self._processor.update_state(update)
        found = self._processor.apply(
            self._tensor([logits_of([*tokens, *made], adapter)])
        )
        return int(found[0].argmax())


class Server:
    """The routes of vLLM; without a logits processor, that of embeddings only."""

    def __init__(self, processor: str | None, adapters: list[str]) -> None:
        if processor is not None:
            self._sampling = Sampling(processor)
        self._adapters = adapters

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def metrics(self, request: web.Request) -> web.Response:
        line = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25'
        return web.Response(text=f"# HELP\n{line}\n")

    async def embeddings(self, request: web.Request) -> web.Response:
        """Return a vector for each text, in the opposite order."""
        body = await request.json()
        assert body["encoding_format"] == "base64"
        await asyncio.sleep(STEP_S)
        kind = body["input"][0][0]
        if kind == HANG:
            await asyncio.sleep(600.0)
        if kind in (REFUSE, BROKEN):
            status = 400 if kind == REFUSE else 500
            return web.json_response({"error": {"message": "no"}}, status=status)
        if kind == DIE:
            os._exit(9)
        data = [
            {"index": number, "embedding": base64.b64encode(vector_of(ids)).decode()}
            for number, ids in enumerate(body["input"])
        ]
        if kind == SHORT:
            half = base64.b64encode(bytes(4 * HIDDEN // 2)).decode()
            data = [{**one, "embedding": half} for one in data]
        if kind == TWICE:
            data[-1]["index"] = 0
        text = json.dumps({"data": [] if kind == EARLY else data[::-1]})
        text = text[:20] if kind == GARBAGE else text
        return web.Response(text=text, content_type="application/json")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens, asked = body["token_ids"], body["sampling_params"]
        kind, adapter = tokens[0], body.get("model", "")
        if adapter and adapter not in self._adapters:
            return web.json_response({"error": {"message": adapter}}, status=404)
        if kind == HANG:
            await asyncio.sleep(600.0)
        if kind in (REFUSE, BROKEN):
            status = 400 if kind == REFUSE else 500
            return web.json_response({"error": {"message": "no"}}, status=status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        made: list[int] = []
        while len(made) < asked["max_tokens"] or kind == FLOOD:
            await asyncio.sleep(STEP_S)
            if kind == DIE and len(made) == 3:
                os._exit(9)
            if kind == EARLY and len(made) == 3:
                break
            token = self._sampling.next(asked, tokens, made, adapter)
            if kind == FOREIGN:
                token = 10**6
            logprobs = None
            if asked.get("logprobs") is not None:
                scores = scores_of([*tokens, *made], adapter)
                top = sorted(scores, key=scores.__getitem__, reverse=True)
                # The sampled token comes first, and is one of the ``logprobs`` tokens.
                listed = list(dict.fromkeys((token % VOCABULARY, *top)))
                best = [
                    {"token_id": each, "logprob": scores[each]}
                    for each in listed[: max(1, asked["logprobs"])]
                ]
                logprobs = {"content": [{**best[0], "top_logprobs": best}]}
            choice = {"index": 0, "token_ids": [token], "logprobs": logprobs}
            data = json.dumps({"request_id": "", "choices": [choice]})
            if kind == GARBAGE:
                data = data[:20]
            if kind == HUGE:
                data = data + " " * 10_000_000
            await answer.write(f"data: {data}\n\n".encode())
            made.append(token)
            if token in asked["stop_token_ids"] and kind != FLOOD:
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer


def main(arguments: list[str]) -> None:
    given = dict(itertools.pairwise(arguments))
    adapters = []
    if "--lora-modules" in arguments:
        rest = arguments[arguments.index("--lora-modules") + 1 :]
        pairs = itertools.takewhile(lambda text: not text.startswith("--"), rest)
        adapters = [pair.partition("=")[0] for pair in pairs]
    server = Server(given.get("--logits-processors"), adapters)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/metrics", server.metrics),
            web.post("/inference/v1/generate", server.generate),
            web.post("/v1/embeddings", server.embeddings),
        ]
    )
    port = int(given["--port"])
    web.run_app(app, host=given["--host"], port=port, print=None)


if __name__ == "__main__":
    sys.path.pop(0)  # the tests
    main(sys.argv[1:])
