"""Stages of a Hugging Face model, which together compute what the whole does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from multiworld.errors import SpecError
from multiworld.serve.engine.models import architectures, huggingface
from multiworld.serve.spec.datatypes import example_of
from multiworld.serve.spec.stage import StageContext

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**TINY, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "bert": TINY,
    "distilbert": {
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 4,
        "n_heads": 4,
        "vocab_size": 200,
        "max_position_embeddings": 64,
    },
    "electra": {**TINY, "embedding_size": 16},
    "modernbert": TINY,
    "mpnet": TINY,
    "roberta": TINY,
    "xlm-roberta": TINY,
    "falcon": {**TINY, "alibi": False},
    "gemma": WIDE,
    "gemma2": {**WIDE, "sliding_window": 4},
    "gemma3_text": {**WIDE, "sliding_window": 4, "sliding_window_pattern": 2},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 200},
    "gpt_neox": TINY,
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 4},
    "mixtral": {**GROUPED, "num_local_experts": 2},
    "opt": {**TINY, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi3": GROUPED,
    "qwen2": GROUPED,
    "qwen3": WIDE,
}
HEAVY = ("electra", "xlm-roberta", "gemma", "gemma2", "mistral", "phi3", "qwen2")
"""Architectures that are similar to others, which always run."""


def saved(
    kind: str, folder: Path, sizes: dict[str, Any] | None = None, **more: Any
) -> torch.nn.Module:
    torch.manual_seed(7)
    sizes = ARCHITECTURES[kind] if sizes is None else sizes
    config = transformers.AutoConfig.for_model(kind, **sizes, **more)
    kind_of: Any = transformers.AutoModel
    whole: torch.nn.Module = kind_of.from_config(config).eval()
    whole.save_pretrained(folder)  # type: ignore[operator]
    return whole


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.heavy) if kind in HEAVY else kind
        for kind in ARCHITECTURES
    ],
)
def test_three_stages_are_the_whole_model(kind: str, tmp_path: Path) -> None:
    whole = saved(kind, tmp_path)
    ids = torch.randint(3, 200, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    tensors = {"input_ids": ids, "attention_mask": mask}
    model = huggingface.model(str(tmp_path), stages=3, cut=[1, 3])
    weights = 0
    with torch.inference_mode():
        wanted = whole(**tensors).last_hidden_state
        for stage in model.stages:
            part = stage.load(StageContext())
            weights += sum(p.numel() for p in part.parameters())  # type: ignore[attr-defined]
            tensors = part(tensors)
    found = tensors["last_hidden_state"]
    real = mask.unsqueeze(-1).bool()
    assert torch.equal(found.masked_fill(~real, 0), wanted.masked_fill(~real, 0))
    shared = {"mpnet": 128}  # the bias that all layers share, in the other two stages
    total = sum(p.numel() for n, p in whole.named_parameters() if "pooler" not in n)
    assert weights <= sum(p.numel() for p in whole.parameters()) + 2 * shared.get(
        kind, 0
    )
    assert weights >= total


OTHERS: dict[str, dict[str, Any]] = {
    "granite": {**GROUPED, "embedding_multiplier": 3.0},
    "granite_swa": {
        **GROUPED,
        "layer_types": ["sliding_attention", *["full_attention"] * 3],
        "layer_rope_theta": [10_000.0, 0, 0, 10_000.0],
    },
    "olmoe": {**GROUPED, "num_experts": 2, "num_experts_per_tok": 1},
    "stablelm": GROUPED,
    "megatron-bert": TINY,
    "esm": {**TINY, "position_embedding_type": "rotary"},
    "camembert": TINY,
    "xlm-roberta-xl": TINY,
    "deberta-v2": {**TINY, "relative_attention": True, "position_biased_input": False},
}
"""Architectures that no table names: a norm or a factor could be applied twice."""

UNCUT: dict[str, dict[str, Any]] = {
    "nanochat": GROUPED,
    "biogpt": TINY,
    "bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 200},
    "deberta-v2": {**TINY, "conv_kernel_size": 3},
}
"""Architectures that do work outside their layers in a way that is not known."""


@pytest.mark.parametrize("kind", OTHERS)
def test_architecture_that_nobody_compared_is_right_all_the_same(
    kind: str, tmp_path: Path
) -> None:
    whole = saved(kind, tmp_path, OTHERS[kind])
    ids = torch.randint(3, 200, (2, 9))
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = huggingface.model(str(tmp_path), stages=3)
    with torch.inference_mode():
        wanted = whole(**tensors).last_hidden_state
        for stage in model.stages:
            tensors = stage.load(StageContext())(tensors)
    assert torch.allclose(tensors["last_hidden_state"], wanted, atol=1e-5)


@pytest.mark.parametrize("kind", UNCUT)
def test_architecture_that_would_be_wrong_in_stages_is_refused(
    kind: str, tmp_path: Path
) -> None:
    whole = saved(kind, tmp_path, UNCUT[kind])
    for stage in huggingface.model(str(tmp_path), stages=2).stages:
        with pytest.raises(SpecError, match="would not compute the same"):
            stage.load(StageContext())
    ids = torch.randint(3, 200, (1, 9))
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    (stage,) = huggingface.model(str(tmp_path), stages=1).stages
    with torch.inference_mode():
        found: Any = stage.load(StageContext())(tensors)
        assert torch.equal(
            found["last_hidden_state"], whole(**tensors).last_hidden_state
        )


def test_every_listed_architecture_is_tested() -> None:
    named = set(architectures.TESTED.replace(";", ",").replace(" ", "").split(","))
    assert named == ARCHITECTURES.keys()


def test_dtype_defaults_to_that_of_the_folder(tmp_path: Path) -> None:
    saved("llama", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[operator]
    model = huggingface.model(str(tmp_path), stages=2)
    assert model.outputs[0].datatype == "BF16"
    part = model.stages[0].load(StageContext())
    assert part(example_of(model))["hidden"].dtype is torch.bfloat16
    other = huggingface.model(str(tmp_path), stages=2, dtype="float32")
    assert other.outputs[0].datatype == "FP32"
    with pytest.raises(SpecError, match="dtype 'int8' is not one of float32"):
        huggingface.model(str(tmp_path), dtype="int8")


def test_missing_weights_are_reported(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    model = huggingface.model(str(tmp_path), stages=2)
    with pytest.raises(SpecError, match=r"layers\.1\.mlp\.up_proj"):
        model.stages[0].load(StageContext())
    model.stages[1].load(StageContext())


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("t5", {"d_model": 32, "num_layers": 2}, "an encoder and a decoder"),
        ("albert", {"num_hidden_layers": 2}, "no known chain of layers"),
    ],
)
def test_model_without_a_chain_of_layers_is_reported(
    kind: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    transformers.AutoConfig.for_model(kind, **options).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    model = huggingface.model(str(tmp_path), stages=2)
    with pytest.raises((SpecError, OSError), match=reason):
        model.stages[0].load(StageContext())
