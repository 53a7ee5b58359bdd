"""Memory that stages book for text generation."""

from __future__ import annotations

from typing import Any

from multiworld.config import MIB
from multiworld.serve.machines.amounts import needs_of
from multiworld.serve.spec.schema import ModelSpec


def model(stages: list[dict[str, Any]], **generation: Any) -> ModelSpec:
    asked = {"path": "x", "generation": generation, "stages": stages}
    return ModelSpec.model_validate(asked)


def test_kv_memory_is_added_to_what_a_stage_declares() -> None:
    """The last stage has no log; a stage that declares nothing books nothing."""
    spec = model(
        [{"memory_mb": 1000}, {}, {"memory_mb": 2000}],
        kv_cache_memory_mb=300,
        backup_memory_mb=40,
        prefix_cache_memory_mb=5,
    )
    found = [need.memory_bytes / MIB for need in needs_of(spec)]
    assert found == [1345, 0, 2305]


def test_prefixes_that_are_not_kept_take_no_memory() -> None:
    """The last stage has no log."""
    stage = {"memory_mb": 1000}
    spec = model([stage, stage], kv_cache_memory_mb=300, enable_prefix_caching=False)
    assert [n.memory_bytes / MIB for n in needs_of(spec)] == [1428, 1300]


def test_other_models_book_what_they_declare() -> None:
    """They have no KV cache."""
    spec = ModelSpec.model_validate({"factory": "a:b", "stages": [{"memory_mb": 7}]})
    assert needs_of(spec)[0].memory_bytes == 7 * MIB
