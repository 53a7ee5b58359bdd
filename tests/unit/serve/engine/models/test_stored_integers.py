"""Folders whose weights are int8 already, as compressed-tensors stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from multiworld.errors import SpecError
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows
from multiworld.serve.engine.models import decoder, decoder_stage
from multiworld.serve.engine.models.integer_linear import quantized
from multiworld.serve.engine.models.partition import Span
from tests.tiny_decoder import save_decoder

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKENS = torch.tensor([5, 9, 200, 31, 7])


def packed(integers: torch.Tensor) -> torch.Tensor:
    """Return integers in the layout of ``pack-quantized``."""
    outputs, inputs = integers.shape
    octets = torch.zeros(outputs, -(-inputs // 4) * 4, dtype=torch.int64)
    octets[:, :inputs] = integers.long() + 128
    each = octets.view(outputs, -1, 4) << torch.tensor([0, 8, 16, 24])
    found = each.sum(-1)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def quantize_folder(folder: Path, layout: str, **weights: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj" not in name:
            tensors[name] = tensor
            continue
        integers, scale = quantized(tensor)
        tensors[f"{name}_scale"] = scale[:, None]
        if layout == "pack-quantized":
            tensors[f"{name}_packed"] = packed(integers)
            tensors[f"{name}_shape"] = torch.tensor(integers.shape)
        else:
            tensors[name] = integers
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"weights": {**WEIGHTS, **weights}}},
    }
    (folder / "config.json").write_text(json.dumps(config))


def logits(folder: Path, span: Span, rows: torch.Tensor) -> torch.Tensor:
    stage = decoder_stage.load(folder, span, "float32", "cpu", "int8")
    at = torch.arange(len(TOKENS))
    step = KvCache().step([Rows("a", 0, len(TOKENS))])
    with torch.inference_mode():
        found: torch.Tensor = stage(rows, at, step, at)
    return found


@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_stored_integers_are_loaded_as_they_are(
    tmp_path: Path, kind: str, layout: str
) -> None:
    folder = save_decoder(tmp_path, kind)
    spans = Span(0, 2, 4), Span(2, 4, 4)
    wanted = TOKENS
    for span in spans:
        wanted = logits(folder, span, wanted)
    quantize_folder(folder, layout)
    found = TOKENS
    for span in spans:
        found = logits(folder, span, found)
    assert torch.equal(found, wanted)


def test_stored_integers_keep_their_own_scales(tmp_path: Path) -> None:
    """Their largest magnitude is below 127, unlike in weights that we quantize."""
    from safetensors.torch import load_file, save_file

    folder = save_decoder(tmp_path, "llama")
    quantize_folder(folder, "int-quantized")
    path, name = folder / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name] = (tensors[name] / 2).to(torch.int8)
    tensors[f"{name}_scale"] *= 2
    whole = Span(0, 4, 4)
    before = logits(folder, whole, TOKENS)
    save_file(tensors, path, {"format": "pt"})
    stage: Any = decoder_stage.load(folder, whole, "float32", "cpu", "int8")
    up = stage.whole.model.layers[0].mlp.up_proj
    given = torch.eye(up.in_features)
    exact = tensors[name].float() * tensors[f"{name}_scale"]
    with torch.inference_mode():
        assert torch.allclose(up(given).t(), exact, rtol=1e-4, atol=1e-6)
    assert torch.allclose(logits(folder, whole, TOKENS), before, atol=0.2)


@pytest.mark.parametrize(
    ("told", "quantization", "reason"),
    [
        ({}, None, "write `quantization: int8`"),
        ({"format": "float-quantized"}, "int8", "compressed-tensors float-quantized"),
        ({"quant_method": "gptq", "format": None}, "int8", "gptq"),
        ({"weights": {"num_bits": 4}}, "int8", "8 bits, symmetric"),
        ({"weights": {"strategy": "group"}}, "int8", "by channel or tensor"),
        ({"weights": {"symmetric": False}}, "int8", "symmetric"),
        ({"config_groups": {"W8A16": ["Linear"]}}, "int8", "without sparsity"),
        ({"sparsity_config": {"format": "sparse-24"}}, "int8", "without sparsity"),
        ({"transform_config": {"R1": {}}}, "int8", "or transforms"),
    ],
)
def test_other_quantized_weights_are_refused_by_name(
    tmp_path: Path, told: dict[str, Any], quantization: str | None, reason: str
) -> None:
    folder = save_decoder(tmp_path, "llama")
    quantize_folder(folder, "int-quantized", **told.pop("weights", {}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= told
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=reason):
        decoder.model(str(folder), quantization=quantization)


@pytest.mark.parametrize("what", ["embedding", "no weight"])
def test_integers_of_anything_but_products_are_refused(
    tmp_path: Path, what: str
) -> None:
    """Nothing would apply their scales."""
    from safetensors.torch import load_file, save_file

    folder = save_decoder(tmp_path, "llama")
    quantize_folder(folder, "int-quantized")
    tensors, reason = load_file(folder / "model.safetensors"), "to a linear layer"
    if what == "embedding":
        tensors["model.embed_tokens.weight_scale"] = torch.ones(300, 1)
    else:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        reason = "needs exactly one weight; found: none"
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match=reason):
        decoder_stage.load(folder, Span(0, 2, 4), "float32", "cpu", "int8")


def test_experts_that_are_integers_are_refused(tmp_path: Path) -> None:
    """transformers would copy the integers into its tensor of floats."""
    folder = save_decoder(tmp_path, "qwen3_moe")
    quantize_folder(folder, "int-quantized")
    with pytest.raises(SpecError, match=r"layers\.[01]\..*experts of a mixture cannot"):
        decoder_stage.load(folder, Span(0, 2, 4), "float32", "cpu", "int8")
