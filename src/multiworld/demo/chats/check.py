"""Comparison of the chats with undisturbed runs: transformers' own forward pass, which
rounds differently, and one stage with the same kernels, whose exact tokens
``deterministic: true`` promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multiworld.demo.chats.chats import Chat
from multiworld.serve.engine.compute.kv_cache import Rows
from multiworld.serve.engine.compute.stage_engine import engine_of
from multiworld.serve.engine.models import decoder_stage
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.spec.stage import Generation

# Accepted difference between a token's logit and the largest one: kernels for one row
# and for many rows round differently.
TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Verdict:
    wrong: int  # tokens that the undisturbed model would not choose
    equal: int  # chats whose tokens all equal those of an undisturbed run
    broken: tuple[str, ...]  # chats that were cut off, and why


def check(folder: Path, chats: Sequence[Chat], tell: Callable[[int], None]) -> Verdict:
    """Compare every token with the model's choice given the preceding tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    reference = Undisturbed(folder, model.config.num_hidden_layers)
    wrong = equal = 0
    broken = tuple(f"chat {c.number}: {c.error}" for c in chats if c.error)
    for done, chat in enumerate(chats, 1):
        gaps = _gaps(model, chat) if chat.tokens else torch.zeros(1)
        wrong += int((gaps > TOLERANCE).sum())
        equal += not chat.error and reference.choices(chat) == chat.tokens
        tell(done)
    return Verdict(wrong, equal, broken)


class Undisturbed:
    """The whole model as one stage with deterministic kernels."""

    def __init__(self, folder: Path, layers: int) -> None:
        stage = decoder_stage.load(folder, Span(0, layers, layers), "float32", "cpu")
        facts = Generation(
            tokenizer=lambda: None,
            end_tokens=(),
            vocabulary=0,
            max_tokens=0,
            kv_bytes=[0],
        )
        self._engine = engine_of(
            stage, is_last=True, model=facts, is_deterministic=True
        )

    def choices(self, chat: Chat) -> list[int]:
        """Return the model's choice for each token of an answer, in one step."""
        ids = (chat.prompt + chat.tokens)[:-1]
        rows = Rows(chat.number, 0, len(ids))
        wanted = torch.arange(len(chat.prompt) - 1, len(ids))
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # one thread, as in the demo's stages
        try:
            with torch.inference_mode():
                attention = self._engine.cache.step([rows])
                at = torch.arange(len(ids))
                logits = self._engine.function(torch.tensor(ids), at, attention, wanted)
        finally:
            torch.set_num_threads(before)
            self._engine.cache.free(chat.number)
        return [int(token) for token in logits.argmax(-1)]


def _gaps(model: Any, chat: Chat) -> torch.Tensor:
    """Return how far each token's logit is below the largest one."""
    ids = torch.tensor([chat.prompt + chat.tokens])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(chat.prompt) - 1 : -1]
    chosen = logits[torch.arange(len(chat.tokens)), torch.tensor(chat.tokens)]
    found: torch.Tensor = logits.max(-1).values - chosen
    return found
