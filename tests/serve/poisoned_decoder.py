"""Generating model of two stages that dies, hangs or grows when it sees a token."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from multiworld.serve.spec.stage import Generation, Model, Stage, StageContext
from multiworld.serve.text.tokenizer import Tokenizer
from tests.tiny_decoder import save_tokenizer

POISON, HANG, GROW = 250, 251, 252
MAX_GROWTHS = 100
WORDS = 300


def front(context: StageContext) -> Any:
    """Return a stage that ends its process, hangs or grows when it sees the token."""

    def compute(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
        if bool((rows == POISON).any()):
            os._exit(9)
        if bool((rows == HANG).any()):
            time.sleep(600.0)  # until the replica ends itself
        if bool((rows == GROW).any()):
            grown = []
            for _ in range(MAX_GROWTHS):  # until the replica is ended
                grown.append(torch.ones(5_000_000))
                time.sleep(0.02)
        return rows[:, None].float()

    return compute


def back(context: StageContext) -> Any:
    """Return a stage that counts on from the last token."""

    def compute(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
        following = (rows[wanted, 0].long() + 1) % 200
        return torch.nn.functional.one_hot(following, WORDS).float()

    return compute


def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory(prefix="multiworld-tokenizer-") as folder:
        save_tokenizer(Path(folder))
        return Tokenizer(Path(folder))


def model() -> Model:
    facts = Generation(
        tokenizer=tokenizer,
        end_tokens=(0,),
        vocabulary=WORDS,
        max_tokens=256,
        kv_bytes=[64, 64],
    )
    return Model(stages=[Stage(load=front), Stage(load=back)], generation=facts)
