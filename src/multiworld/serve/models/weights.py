"""Reading some of the tensors in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path

from torch import Tensor

from multiworld.errors import SpecError

INDEX = "model.safetensors.index.json"


def read_weights(path: Path, wanted: Set[str]) -> dict[str, Tensor]:
    """Return those of the ``wanted`` tensors that are there; nothing else is read.

    Args:
        path: A file, or a folder with ``model.safetensors`` or an index of several.

    Raises:
        SpecError: There is no such file, or it is none of that kind.
    """
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for file in files_of(path):
        try:
            with safe_open(file, framework="pt") as weights:
                for key in wanted & set(weights.keys()):
                    found[key] = weights.get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise SpecError(f"{file}: {error}; give a safetensors file") from error
    return found


def files_of(path: Path) -> list[Path]:
    """Return the files with weights.

    Raises:
        SpecError: There are none.
    """
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError) as error:
            raise SpecError(f"{index}: {error}") from error
        return [path / name for name in names]
    single = path / "model.safetensors"
    if not single.exists():
        raise SpecError(f"{path} has no model.safetensors; save the model with it")
    return [single]
