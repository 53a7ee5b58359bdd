"""The stage that asks an engine for embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from multiworld.errors import InvalidRequestError, ModelFailedError, SpecError
from multiworld.serve.models.factory import build_model
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.spec.stage import Stage, StageContext, StageFunction
from tests import fake_vllm
from tests.tiny_decoder import save_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model."""
    return save_decoder(tmp_path_factory.mktemp("decoder"))


def spec_of(folder: Path, **more: Any) -> ModelSpec:
    """Return the spec of a model that embeds."""
    data = {"path": str(folder), "engine": "vllm", "embeddings": True}
    return ModelSpec.model_validate({**data, **more})


@pytest.fixture(scope="module")
def stage(folder: Path) -> StageFunction:
    """Return a stage whose engine runs; it ends with this process's leash."""
    python = str(fake_vllm.interpreter(folder))
    (made,) = build_model(spec_of(folder, engine_python=python)).stages
    assert isinstance(made, Stage)
    return made.load(StageContext())


def asked(*texts: list[int]) -> dict[str, torch.Tensor]:
    """Return a batch of texts of different lengths."""
    longest = max(map(len, texts))
    rows = [[*ids, *[0] * (longest - len(ids))] for ids in texts]
    masks = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def test_each_row_gets_the_embedding_of_its_text(stage: StageFunction) -> None:
    """Without its padding, and whatever order the engine answers in."""
    texts = [[5, 6, 7], [5], [9, 0]]
    found = stage(asked(*texts))["embedding"]
    assert found.dtype == torch.float32
    for row, ids in zip(found, texts, strict=True):
        assert row.numpy().tobytes() == fake_vllm.vector_of(ids)


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (fake_vllm.REFUSE, InvalidRequestError),
        (fake_vllm.BROKEN, ModelFailedError),
        (fake_vllm.GARBAGE, ModelFailedError),
        (fake_vllm.EARLY, ModelFailedError),
    ],
)
def test_engine_that_misbehaves_costs_one_request(
    token: int, error: type[Exception], stage: StageFunction
) -> None:
    """The next one is answered."""
    with pytest.raises(error):
        stage(asked([token, 1]))
    assert len(stage(asked([1, 2]))["embedding"]) == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"engine": "openai"}, "vllm or llama.cpp"),
        ({"generation": {}}, "generates no text"),
        ({"adapters": {"a": "b"}}, "generates no text"),
    ],
)
def test_fields_without_an_effect_are_refused(
    more: dict[str, Any], text: str, folder: Path
) -> None:
    """When the spec is read."""
    with pytest.raises(ValidationError, match=text):
        spec_of(folder, **more)


def test_arguments_that_the_service_sets_are_refused(folder: Path) -> None:
    """By name."""
    with pytest.raises(SpecError, match="runner"):
        build_model(spec_of(folder, engine_args={"runner": "generate"}))
    with pytest.raises(SpecError, match="GGUF file"):
        build_model(spec_of(folder, engine="llama.cpp"))


def test_texts_are_cut_to_what_the_engine_takes(folder: Path) -> None:
    """As everywhere, text is truncated and token ids are refused."""
    model = build_model(spec_of(folder, engine_args={"max_model_len": 8}))
    assert model.text is not None
    assert model.text().encode("a" * 100)["input_ids"].shape == (1, 8)
    assert model.check is not None
    with pytest.raises(InvalidRequestError, match="at most 8"):
        model.check(asked(list(range(1, 10))))
