"""Suite "quality": cost of quantization in perplexity, on SmolLM2.

Every text is computed once in float32 and once in int8. The second measurement is the
share of positions at which both have the same most likely token. Each round computes
another part of the texts; the sizes are the numbers of the texts in ``TEXTS``. The
English text comes from Python's own reference, the code from Python's modules.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.members import Options, Step
from multiworld.demo import smollm2
from multiworld.serve.engine.compute.compiled_layers import compile_layers
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows
from multiworld.serve.engine.models import decoder_stage
from multiworld.serve.engine.models.packed_linear import pack_linears
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.text.tokenizer import Tokenizer

FLOAT, INTEGER = "float32", "int8"
"""Names of the contenders."""

PERPLEXITY, SAME = "perplexity by text", "same most likely token by text"

TEXTS = ("English", "Python", "German", "French", "Spanish", "Chinese")

TOKENS, CHUNK = 400, 200
"""Tokens of a text in a round, and in one call."""

LAYERS = 30

DATA = Path(__file__).parents[1] / "data" / "quality"

OnStep = Callable[[Step], None]


def run(options: Options, on_step: OnStep) -> None:
    """Compute the texts with both contenders."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    on_step(("note", "texts: " + ", ".join(f"{n} {t}" for n, t in enumerate(TEXTS, 1))))
    encode = Tokenizer(folder).encode
    stages = {FLOAT: _stage(folder, None), INTEGER: _stage(folder, "int8")}
    for place, name in enumerate(TEXTS, 1):
        ids = torch.tensor(encode(_text(name)))
        count = min(TOKENS, len(ids))
        rounds = 1 if options.is_quick else options.rounds
        for number in range(rounds):
            on_step(("step", (place / (len(TEXTS) + 1), f"{name}, round {number + 1}")))
            # Parts overlap if a text is short.
            begin = (len(ids) - count) * number // max(1, rounds - 1)
            part = ids[begin : begin + count]
            logits = {who: _read(stage, part) for who, stage in stages.items()}
            for who, found in logits.items():
                sample = PERPLEXITY, place, who, "", _perplexity(found, part)
                on_step(("sample", sample))
            same = logits[FLOAT].argmax(-1) == logits[INTEGER].argmax(-1)
            share = 100 * float(same.float().mean())
            on_step(("sample", (SAME, place, INTEGER, "%", share)))


def _stage(folder: Path, quantization: str | None) -> Any:
    span = Span(0, LAYERS, LAYERS)
    stage = decoder_stage.load(folder, span, FLOAT, "cpu", quantization)
    with torch.inference_mode():
        pack_linears(stage)
        compile_layers(stage)
    return stage


@torch.inference_mode()
def _read(stage: Any, ids: Tensor) -> Tensor:
    """Return the logits after each token, [tokens, words]."""
    cache, found = KvCache(), []
    for begin in range(0, len(ids), CHUNK):
        rows = ids[begin : begin + CHUNK]
        at = torch.arange(begin, begin + len(rows))
        step = cache.step([Rows(0, begin, len(rows))])
        found.append(stage(rows, at, step, torch.arange(len(rows))))
    return torch.cat(found)


def _perplexity(logits: Tensor, ids: Tensor) -> float:
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])
    return math.exp(-float(logprobs.mean()))


def _text(name: str) -> str:
    if name == "English":
        from pydoc_data import topics

        return "\n".join(sorted(topics.topics.values(), key=len)[-8:])
    if name == "Python":
        import argparse
        import heapq

        return inspect.getsource(heapq) + inspect.getsource(argparse)
    return (DATA / f"{name.lower()}.txt").read_text()
