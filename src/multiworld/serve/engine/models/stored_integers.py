"""Weights that a folder already has in int8, in the formats of compressed-tensors.

Two of these formats have 8 bits and a scale for each output: ``int-quantized`` stores
the integers as they are; ``pack-quantized`` adds 128 to them and stores four in an
int32. Settings of a folder for activations are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multiworld.errors import SpecError
from multiworld.serve.engine.models.weights import read_weights

FORMATS = ("int-quantized", "pack-quantized")

Stored = tuple[Tensor, Tensor]  # integers, [outputs, inputs], int8; scales, [outputs]


def check_config(
    folder: Path, config: Mapping[str, Any], quantization: str | None
) -> None:
    """Raise SpecError for quantized weights that cannot or should not be loaded."""
    stored = config.get("quantization_config")
    if not stored:
        return
    groups = stored.get("config_groups") or {}
    sparsity = stored.get("sparsity_config") or {}
    is_known = (
        stored.get("quant_method") == "compressed-tensors"
        and stored.get("format") in FORMATS
        and all(map(_is_by_output, groups.values()))
        and sparsity.get("format", "dense") == "dense"
        and not stored.get("transform_config")
    )
    if not is_known:
        kind = f"{stored.get('quant_method')} {stored.get('format', '')}".strip()
        raise SpecError(
            f"{folder}: its weights are quantized ({kind}); only compressed-tensors "
            f"with {' or '.join(FORMATS)}, 8 bits, symmetric, by channel or tensor, "
            "without sparsity or transforms, can be loaded; use the model with float "
            "weights"
        )
    if quantization is None:
        raise SpecError(
            f"{folder}: its weights are int8; write `quantization: int8` in the spec"
        )


def _is_by_output(group: Any) -> bool:
    """Return whether weights have 8 bits, and a scale for each output or tensor."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return (
        isinstance(weights, Mapping)
        and weights.get("num_bits") == 8
        and weights.get("type", "int") == "int"
        and bool(weights.get("symmetric", True))
        and weights.get("strategy") in ("channel", "tensor")
    )


def read_stored(folder: Path, names: Iterable[str]) -> dict[str, Stored]:
    """Return the int8 weights that a folder has for modules, by module."""
    found: dict[str, Stored] = {}
    names = list(names)
    scales = read_weights(folder, {f"{name}.weight_scale" for name in names})
    for name in names:
        scale = scales.get(f"{name}.weight_scale")
        if scale is None:
            continue
        kinds = {f"{name}.{kind}" for kind in ("weight", "weight_packed")}
        weights = read_weights(folder, kinds)
        if len(weights) != 1:
            raise SpecError(
                f"{folder} has a scale for {name}, which needs exactly one weight; "
                f"found: {', '.join(sorted(weights)) or 'none'}"
            )
        ((key, weight),) = weights.items()
        if key.endswith("_packed"):
            shape = read_weights(folder, {f"{name}.weight_shape"})
            weight = _unpacked(weight, shape[f"{name}.weight_shape"].tolist())
        if weight.dtype != torch.int8 or scale.numel() not in (1, len(weight)):
            raise SpecError(
                f"{folder}: {key} is {weight.dtype} with {scale.numel()} scales; only "
                "int8 with one scale, or one for each output, can be loaded"
            )
        found[name] = weight, scale.float().reshape(-1).expand(len(weight)).clone()
    return found


def _unpacked(packed: Tensor, shape: list[int]) -> Tensor:
    """Return the integers that were packed into int32, the lowest bits first."""
    octets = packed.contiguous().view(torch.uint8).view(len(packed), -1)
    return (octets[:, : shape[1]].to(torch.int16) - 128).to(torch.int8)
