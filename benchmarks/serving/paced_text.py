"""Model that generates text and whose stages sleep, for scaling benchmarks."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multiworld.serve.controller.scaling.step_costs import USUAL_RATIO
from multiworld.serve.spec.stage import Generation, Model, Stage, StageContext
from multiworld.serve.text.tokenizer import Tokenizer

WORDS = 256
"""Number of tokens; each is a byte."""


def _stage(ms: float, is_last: bool) -> Stage:
    def load(context: StageContext) -> Any:
        def run(rows: Tensor, positions: Tensor, cache: Any, wanted: Tensor) -> Tensor:
            time.sleep(ms / 1000 * (USUAL_RATIO + len(rows)))
            if not is_last:
                return torch.zeros(len(rows), 1)
            logits = torch.zeros(len(wanted), WORDS)
            logits[:, ord("a")] = 1.0
            return logits

        return run

    return Stage(load=load, name=f"{ms:g}ms")


def _tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer as Bytes
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    names = {f"<0x{number:02X}>": number for number in range(WORDS)}
    made = Bytes(models.BPE(vocab=names, merges=[], byte_fallback=True))
    made.decoder = decoders.ByteFallback()
    with tempfile.TemporaryDirectory() as folder:
        fast(tokenizer_object=made).save_pretrained(folder)
        return Tokenizer(Path(folder))


def model(ms: tuple[float, ...] = (0.3, 0.6, 0.4)) -> Model:
    """Return a model with one stage for each number of milliseconds per token."""
    # The stages sleep and use no core. A step takes nine times this long, plus this
    # long for each of its tokens.
    last = len(ms) - 1
    return Model(
        stages=[_stage(one, number == last) for number, one in enumerate(ms)],
        generation=Generation(
            tokenizer=functools.partial(_tokenizer),
            end_tokens=(),
            vocabulary=WORDS,
            max_tokens=100_000,
            kv_bytes=[64] * len(ms),
        ),
    )
