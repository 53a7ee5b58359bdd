"""SmolLM2 in three stages, compared with ``generate`` of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multiworld.demo import smollm2
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows
from multiworld.serve.engine.models import decoder_stage
from multiworld.serve.engine.models.partition import Span
from tests.tiny_decoder import greedy

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not (smollm2.folder() / "config.json").exists(),
        reason="needs SmolLM2; `multiworld demo` fetches it",
    ),
]

LAYERS, COUNT = 30, 48
QUESTIONS = (
    "Why is the sky blue?",
    "¿Qué es un número primo?",
    "Write a poem about rain 🌧️ in spring.",
)


class Chain:
    """Three stages in one process, with the usual kernels in float32."""

    def __init__(self) -> None:
        bounds = [(0, 10), (10, 20), (20, LAYERS)]
        self._stages: list[Any] = [
            decoder_stage.load(smollm2.folder(), Span(*span, LAYERS), "float32", "cpu")
            for span in bounds
        ]
        self._caches = [KvCache() for _ in bounds]

    def step(self, begin: int, ids: list[int]) -> int:
        """Compute tokens of the one sequence; return the most likely next one."""
        rows = [Rows(0, begin, len(ids))]
        x: Any = torch.tensor(ids)
        at = torch.arange(begin, begin + len(ids))
        last = torch.tensor([len(ids) - 1])
        with torch.inference_mode():
            for stage, cache in zip(self._stages, self._caches, strict=True):
                x = stage(x, at, cache.step(rows), last)
        return int(x[0].argmax())


@pytest.mark.parametrize("question", QUESTIONS)
def test_tokens_are_those_of_transformers(question: str) -> None:
    """The prompt is computed in two parts."""
    from transformers import AutoTokenizer

    kind: Any = AutoTokenizer
    tokenizer = kind.from_pretrained(smollm2.folder())
    asked = [{"role": "user", "content": question}]
    prompt: list[int] = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    chain = Chain()
    chain.step(0, prompt[:7])
    found = [chain.step(7, prompt[7:])]
    while len(found) < COUNT:
        found.append(chain.step(len(prompt) + len(found) - 1, found[-1:]))
    assert found == greedy(smollm2.folder(), prompt, COUNT)
