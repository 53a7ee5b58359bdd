"""A model of Qwen3-0.6B's shape, with random weights: larger than any cache.

Its speed is that of the real model; its text means nothing.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from multiworld.serve.engine.models.caches import cache_folder

NAME = "Qwen3-0.6B-random"

# https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}


def made(tokenizer_of: Path) -> Path:
    """Return the folder of the model, which is made once, in the user's cache.

    Args:
        tokenizer_of: Folder with the tokenizer to use, which gets as many tokens as the
            model has.
    """
    folder = cache_folder() / "models" / NAME
    if folder.exists():
        return folder
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        scratch = Path(name) / NAME
        torch.manual_seed(0)
        config = Qwen3Config(**SHAPE, eos_token_id=0, bos_token_id=0)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(scratch)
        _save_tokenizer(tokenizer_of, scratch)
        scratch.rename(folder)
    return folder


def _save_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(source / name, target / name)
    found = json.loads((source / "tokenizer.json").read_text())
    words: dict[str, int] = found["model"]["vocab"]
    known = {*words.values(), *(each["id"] for each in found["added_tokens"])}
    for number in range(SHAPE["vocab_size"]):
        if number not in known:
            words[f"<{number}>"] = number
    (target / "tokenizer.json").write_text(json.dumps(found))
