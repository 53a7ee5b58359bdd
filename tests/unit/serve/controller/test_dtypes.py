"""The dtype of a version: decided once, by what its hosts measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multiworld.config import MIB
from multiworld.serve.controller.dtypes import resolve, resolved_here
from multiworld.serve.engine.models.factory import build_model
from multiworld.serve.machines.amounts import Node, needs_of
from multiworld.serve.spec.schema import AppSpec
from tests.tiny_decoder import save_decoder

FAST, SLOW, UNKNOWN = (
    Node(name, 2, 2**30, bfloat16=cost)
    for name, cost in (("fast", 0.6), ("slow", 4.9), ("unknown", None))
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_decoder(tmp_path, dtype=torch.bfloat16)


def app_of(folder: Path, **more: Any) -> AppSpec:
    generation = more.pop("generation", {})
    stages = [{"memory_mb": 10.0, **more}, {"memory_mb": 10.0, **more}]
    model = {"path": str(folder), "generation": generation, "stages": stages}
    return AppSpec.model_validate({"models": {"m": model}})


def dtype_of(app: AppSpec) -> str | None:
    generation = app.models["m"].generation
    assert generation is not None
    return generation.dtype


@pytest.mark.parametrize(
    ("nodes", "dtype"),
    [
        ([FAST], None),
        ([UNKNOWN], None),
        ([SLOW], "float32"),
        ([FAST, SLOW], "float32"),
        ([], None),
    ],
)
def test_folder_in_bfloat16_is_widened_where_a_host_computes_that_slowly(
    folder: Path, nodes: list[Node], dtype: str | None
) -> None:
    """One slow host suffices: all replicas of a version compute in the same dtype."""
    resolved = resolve(app_of(folder), nodes, {})
    assert dtype_of(resolved.app) == dtype
    assert resolved.why["m"].startswith(dtype or "bfloat16")
    assert ("slow computes" in resolved.why["m"]) is (dtype is not None)


def test_host_that_no_stage_may_use_does_not_matter(folder: Path) -> None:
    app = app_of(folder, nodes=["fa*"])
    assert dtype_of(resolve(app, [FAST, SLOW], {}).app) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_dtype_of_the_spec_overrides_it(folder: Path, dtype: str) -> None:
    app = app_of(folder, generation={"dtype": dtype})
    assert resolve(app, [SLOW], {}).app == app


def test_known_version_keeps_its_dtype(folder: Path) -> None:
    """A restarted controller may see other hosts."""
    app = app_of(folder)
    wide = resolve(app, [SLOW], {}).app
    assert resolve(app, [FAST], {"m": {"1": wide.models["m"]}}).app == wide
    assert resolve(app, [SLOW], {"m": {"1": app.models["m"]}}).app == app
    assert resolve(app, [FAST], {"m": {"0": wide.models["m"]}}).app == app


def test_memory_of_the_wider_weights_is_booked(folder: Path) -> None:
    """Converting bfloat16 to float32 adds as many bytes as the weights have."""
    app = app_of(folder)
    wide = resolved_here("m", app.models["m"], SLOW)
    (facts, widened) = (
        build_model(spec).generation for spec in (app.models["m"], wide)
    )
    assert facts is not None
    assert widened is not None
    assert [2 * n for n in facts.kv_bytes] == list(widened.kv_bytes)
    assert (facts.dtype, widened.dtype) == ("bfloat16", "float32")
    saved = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.5 * saved < sum(facts.weight_bytes) < 2.0 * saved
    pairs = zip(needs_of(app.models["m"]), needs_of(wide), strict=True)
    grown = [after.memory_bytes - before.memory_bytes for before, after in pairs]
    assert grown == pytest.approx(facts.weight_bytes, abs=MIB / 1000)


def test_folder_in_float32_stays_as_it_is(tmp_path: Path) -> None:
    app = app_of(save_decoder(tmp_path))
    assert resolve(app, [SLOW], {}).app == app
