"""SmolLM2 with weights and activations of 8 bits, in the format that vLLM loads.

Weights are rounded to the nearest of 255 steps for each output channel, as in our own
int8; vLLM quantizes the activations of each token. The format is that of the package
compressed-tensors, which is not needed to write it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = 127  # largest quantized number

EIGHT_BITS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**EIGHT_BITS, "strategy": "channel"},
            "input_activations": {**EIGHT_BITS, "strategy": "token", "dynamic": True},
        }
    },
}


def save_quantized(source: Path, folder: Path) -> Path:
    """Write the quantized copy of a Hugging Face folder; return ``folder``."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors |= _quantized(name, tensor)
    save_file(tensors, folder / "model.safetensors")
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja") and "index" not in file.name:
            shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _quantized(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith(tuple(f"{part}.weight" for part in LINEAR)):
        return {name: tensor}
    weight = tensor.float()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / STEPS
    steps = (weight / scale).round().clamp(-STEPS, STEPS).to(torch.int8)
    return {name: steps, f"{name}_scale": scale.to(torch.float32)}
