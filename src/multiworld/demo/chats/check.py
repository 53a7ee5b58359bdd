"""Comparison of the chats with the undisturbed model in this process. Shell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multiworld.demo.chats.chats import Chat

TOLERANCE = 0.01
"""Largest difference between the logit of a token and that of the most likely one:
kernels for one row and for many do not round alike."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of the comparison.

    Attributes:
        wrong: Tokens that the undisturbed model would not choose.
        equal: Chats whose every token is the most likely one there, so that an
            undisturbed run gives the same text.
        broken: Chats that were cut, and why.
    """

    wrong: int
    equal: int
    broken: tuple[str, ...]


def check(folder: Path, chats: Sequence[Chat], tell: Callable[[int], None]) -> Verdict:
    """Compare every token with what the model chooses after those before it.

    Args:
        folder: Folder of the model.
        chats: The finished chats.
        tell: Called with the number of chats that were compared so far.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    wrong = equal = 0
    broken = tuple(f"chat {c.number}: {c.error}" for c in chats if c.error)
    for done, chat in enumerate(chats, 1):
        gaps = _gaps(model, chat) if chat.tokens else torch.zeros(1)
        wrong += int((gaps > TOLERANCE).sum())
        equal += bool((gaps == 0).all()) and not chat.error
        tell(done)
    return Verdict(wrong, equal, broken)


def _gaps(model: Any, chat: Chat) -> torch.Tensor:
    """Return how much less likely each token is than the most likely one, in logits."""
    ids = torch.tensor([chat.prompt + chat.tokens])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(chat.prompt) - 1 : -1]
    chosen = logits[torch.arange(len(chat.tokens)), torch.tensor(chat.tokens)]
    found: torch.Tensor = logits.max(-1).values - chosen
    return found
