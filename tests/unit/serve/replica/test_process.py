"""Settings that a replica's process derives from its spec."""

from __future__ import annotations

from typing import Any

import pytest

from multiworld.serve.replica.process import compute_s_of
from multiworld.serve.spec.schema import ModelSpec

EMBEDDING = {"path": "/m", "engine": "vllm", "embeddings": True}
STAGED = {"path": "/m", "stages": [{}]}


@pytest.mark.parametrize(
    ("data", "limit_s"),
    [
        (EMBEDDING, 60.0),
        ({**EMBEDDING, "compute_s": 5.0}, 5.0),
        (STAGED, None),
        ({**STAGED, "stages": [{"compute_s": 5.0}]}, 5.0),
    ],
)
def test_batch_of_an_engine_has_a_limit_by_default(
    data: dict[str, Any], limit_s: float | None
) -> None:
    """Nothing else detects an engine that hangs but answers its health route."""
    assert compute_s_of(ModelSpec.model_validate(data), 0) == limit_s
