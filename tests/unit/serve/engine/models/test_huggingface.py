"""Facts about a model in a Hugging Face folder, read without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from multiworld.errors import SpecError
from multiworld.serve.engine.models import huggingface
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.text.text_inputs import Tokenizer
from tests.tiny_decoder import save_tokenizer

TRANSFORMER, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"


def encoder(folder: Path, modules: list[str], **pooling: bool) -> str:
    """Write the config files of a sentence encoder; return its folder."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "model_type": "bert"}
    (folder / "config.json").write_text(json.dumps(sizes))
    listed = [
        {
            "idx": n,
            "path": f"{n}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    at = folder / "1_Pooling"
    at.mkdir()
    modes = {f"pooling_mode_{name}": value for name, value in pooling.items()}
    (at / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 8, **modes})
    )
    return str(folder)


@pytest.mark.parametrize("mode", ["mean_tokens", "cls_token"])
def test_tokens_are_pooled_as_the_folder_says(tmp_path: Path, mode: str) -> None:
    modules = [TRANSFORMER, POOLING, NORMALIZE]
    both = {"mean_tokens": False, "cls_token": False}
    made = huggingface.model(encoder(tmp_path, modules, **{**both, mode: True}))
    assert [output.name for output in made.outputs or ()] == ["embedding"]


@pytest.mark.parametrize(
    ("modules", "pooling", "said"),
    [
        ([TRANSFORMER, POOLING, "Dense"], {"mean_tokens": True}, "type Dense are not"),
        ([TRANSFORMER, POOLING], {"max_tokens": True}, "pooling is not supported"),
        (
            [TRANSFORMER, POOLING],
            {"mean_tokens": True, "max_tokens": True},
            "pooling is not supported",
        ),
    ],
)
def test_encoder_that_would_embed_otherwise_is_refused(
    tmp_path: Path, modules: list[str], pooling: dict[str, Any], said: str
) -> None:
    """Its vectors would differ from those of the model."""
    with pytest.raises(SpecError, match=said):
        huggingface.model(encoder(tmp_path, modules, **pooling))


@pytest.mark.parametrize("modules", [[NORMALIZE], []])
def test_embeddings_are_normalized_if_the_folder_says_so(
    tmp_path: Path, modules: list[str]
) -> None:
    """Embeddings that are not normalized are compared by length, too."""
    made = huggingface.model(
        encoder(tmp_path, [TRANSFORMER, POOLING, *modules], mean_tokens=True)
    )
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=200,
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    (stage,) = made.stages
    found: Any = stage.load(StageContext())(huggingface.example(256, 64))
    length = float(found["embedding"].detach().norm())
    assert (abs(length - 1.0) < 1e-5) is bool(modules)


def test_text_is_lowercased_if_the_folder_says_so(tmp_path: Path) -> None:
    """sentence-transformers lowers text before it tokenizes."""
    save_tokenizer(tmp_path)
    found = []
    for lowered in (False, True):
        settings = json.dumps({"do_lower_case": lowered})
        (tmp_path / "sentence_bert_config.json").write_text(settings)
        tokenizer = Tokenizer(tmp_path, 100)
        found.append(tokenizer.encode("Ab")["input_ids"].tolist())
        plain = tokenizer.encode("ab")["input_ids"].tolist()
    assert found[0] != plain
    assert found[1] == plain


def test_default_prompt_that_is_not_added_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "q: "}, "default_prompt_name": "query"})
    )
    folder = encoder(tmp_path, [TRANSFORMER, POOLING], mean_tokens=True)
    assert "default prompt (query)" in huggingface.model(folder).notes[0]


@pytest.mark.parametrize(
    ("kind", "longest"),
    [
        ("roberta", 512),
        ("xlm-roberta", 512),
        ("data2vec-text", 512),
        ("esm", 512),
        ("bert", 514),
    ],
)
def test_positions_that_padding_takes_are_not_counted(kind: str, longest: int) -> None:
    """A longer text would be beyond the table of positions."""
    sizes = {"max_position_embeddings": 514, "pad_token_id": 1, "model_type": kind}
    assert huggingface.longest_of(sizes, 7) == longest
    assert huggingface.max_length_of(Path("/nowhere"), sizes) == longest


def test_text_is_truncated_to_what_the_model_accepts(tmp_path: Path) -> None:
    folder = tmp_path / "encoder"
    folder.mkdir()
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 2048}')
    assert huggingface.max_length_of(folder, {}) == 2048
    assert huggingface.max_length_of(folder, {"max_position_embeddings": 512}) == 512


def test_int8_is_refused_on_a_gpu(tmp_path: Path) -> None:
    """Its operators exist for CPUs only, so the first batch would fail."""
    folder = encoder(tmp_path, [TRANSFORMER, POOLING], mean_tokens=True)
    made = huggingface.model(folder, quantization="int8")
    with pytest.raises(SpecError, match="for CPUs only, not for cuda"):
        made.stages[0].load(StageContext(device="cuda"))
