"""Stages whose rows depend on their padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from multiworld.errors import SpecError
from multiworld.serve.engine.models import huggingface, padding_check
from multiworld.serve.spec.stage import StageContext

SIZES = {
    "vocab_size": 200,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}


def saved(folder: Path, kind: str, **more: Any) -> str:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **more)
    kind_of: Any = transformers.AutoModel
    whole = kind_of.from_config(config)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    whole.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_that_ignore_padding_pass(tmp_path: Path, stages: int) -> None:
    made = huggingface.model(saved(tmp_path, "bert"), stages, dtype="bfloat16")
    for stage in made.stages:
        assert stage.ragged
        stage.load(StageContext())


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("bert", {"max_position_embeddings": 10}),
        ("bert", {"max_position_embeddings": 4}),
        ("roberta", {"max_position_embeddings": 13, "pad_token_id": 1}),
    ],
)
def test_models_of_few_positions_can_be_tried(
    kind: str, more: dict[str, int], tmp_path: Path
) -> None:
    (stage,) = huggingface.model(saved(tmp_path, kind, **more)).stages
    stage.load(StageContext())


def test_trial_that_overflows_shows_nothing() -> None:
    def part(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"hidden": tensors["hidden"] * 1e30}

    def rows(length: int) -> torch.Tensor:
        return torch.full((1, length, 4), 1e30)

    padding_check.check(part, rows, "hidden", 0.0, 100, Path("folder"))


def test_stage_that_does_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding_check, "UNPADDED", frozenset())
    monkeypatch.setattr(huggingface, "UNPADDED", frozenset())
    (stage,) = huggingface.model(saved(tmp_path, "fnet")).stages
    with pytest.raises(SpecError, match="does not ignore padding"):
        stage.load(StageContext())


@pytest.mark.parametrize("kind", sorted(padding_check.UNPADDED))
def test_only_equal_lengths_share_a_batch_if_padding_counts(
    kind: str, tmp_path: Path
) -> None:
    (stage,) = huggingface.model(saved(tmp_path, kind)).stages
    assert stage.ragged == {}
    stage.load(StageContext())


def test_attention_that_a_short_text_changes_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "big_bird", attention_type="block_sparse")
    with pytest.raises(SpecError, match="original_full"):
        huggingface.model(folder)


@pytest.mark.parametrize(("pad", "used"), [(-1, 0), (None, 0), (7, 7), (500, 0)])
def test_rows_are_padded_with_a_token_of_the_vocabulary(
    pad: int | None, used: int, tmp_path: Path
) -> None:
    saved(tmp_path, "llama")
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(json.dumps({**json.loads(text), "pad_token_id": pad}))
    (stage,) = huggingface.model(str(tmp_path)).stages
    assert stage.ragged["input_ids"] == used
