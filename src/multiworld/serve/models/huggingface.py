"""A transformer in a Hugging Face folder on disk, cut by layers.

Works for models with one chain of layers: encoders (BERT and its relatives), and
decoders run without a cache; ``layered`` says which, and loads the stages. What is here
runs in every process of the service, and imports nothing heavy. Nothing is fetched: the
folder has it all.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from multiworld.errors import InvalidRequestError, SpecError
from multiworld.serve.models.chain_partition import chain_partition
from multiworld.serve.models.span import Span, load_stage
from multiworld.serve.spec.stage import Model, Stage, Tensors, TensorSpec

EXAMPLE_TOKENS = 24
"""About as long as a sentence: what is measured with it shall be typical."""

DATATYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
"""What a folder calls the type of its weights, and the protocol."""


def model(
    path: str,
    stages: int = 1,
    max_length: int | None = None,
    cut: Sequence[int] | None = None,
    dtype: str | None = None,
) -> Model:
    """Cut the model in a folder into stages of as equal a cost as whole layers allow.

    Inputs are ``input_ids`` and ``attention_mask``, of shape [rows, length] and INT64.
    A sentence encoder (a folder with ``modules.json``) answers with ``embedding``,
    [rows, hidden], pooled and normalised as the folder says; others with
    ``last_hidden_state``, [rows, length, hidden].

    Args:
        path: The folder.
        stages: How many.
        max_length: Most tokens of a text; what the folder says by default.
        cut: The first layer of every stage after the first, as ``multiworld partition``
            proposes; equally many layers each by default.
        dtype: What to compute in: ``float32``, ``float16`` or ``bfloat16``; what the
            folder says by default.

    Raises:
        SpecError: There is no such model, or too few layers.
    """
    folder = Path(path).expanduser()
    config = _json(folder / "config.json")
    layers = _number(config, LAYERS, folder)
    cuts = _cuts(layers, stages, cut, folder)
    pooling = _pooling(folder)
    hidden = _number(config, HIDDEN, folder)
    dtype = dtype or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    datatype = _datatype(dtype, folder)
    output = (
        TensorSpec("embedding", datatype, (-1, hidden))
        if pooling
        else TensorSpec("last_hidden_state", datatype, (-1, -1, hidden))
    )
    padding = {
        "input_ids": config.get("pad_token_id") or 0,
        "attention_mask": 0,
        "hidden": 0.0,
        "last_hidden_state": 0.0,
    }
    made = [
        Stage(
            load=functools.partial(
                load_stage, folder, Span(begin, end, layers), dtype, pooling
            ),
            name=f"layers {begin}-{end - 1}",
            ragged=padding,
        )
        for begin, end in cuts
    ]
    tokens = max_length or _max_length(folder, config)
    return Model(
        stages=made,
        inputs=[
            TensorSpec("input_ids", "INT64", (-1, -1)),
            TensorSpec("attention_mask", "INT64", (-1, -1)),
        ],
        outputs=[output],
        example=_example,
        check=functools.partial(
            _check,
            int(config.get("vocab_size", 2**31)),
            int(config.get("max_position_embeddings") or 2**31),
        ),
        text=functools.partial(Tokenizer, folder, tokens) if pooling else None,
        preload=_preloaded_modules(str(config.get("model_type", ""))),
        parts=functools.partial(model, path, layers, max_length, dtype=dtype),
    )


def _check(vocabulary: int, longest: int, tensors: Tensors) -> None:
    """Refuse what the embeddings have no row for."""
    ids, mask = tensors["input_ids"], tensors["attention_mask"]
    if ids.shape != mask.shape:
        raise InvalidRequestError(
            f"input_ids has shape {list(ids.shape)} and attention_mask "
            f"{list(mask.shape)}; they must be equal"
        )
    if ids.shape[1] > longest:
        raise InvalidRequestError(
            f"input_ids has {ids.shape[1]} tokens a row; the model takes at most "
            f"{longest}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise InvalidRequestError(
            f"input_ids has tokens from {low} to {high}; the model knows 0 to "
            f"{vocabulary - 1}"
        )


def _preloaded_modules(model_type: str) -> list[str]:
    found = [
        "multiworld.serve.models.transformer_stage",
        "safetensors.torch",
        "tokenizers",
        "transformers.models.auto.modeling_auto",
    ]
    if model_type.isidentifier():
        found.append(f"transformers.models.{model_type}.modeling_{model_type}")
    return found


def _cuts(
    layers: int, stages: int, cut: Sequence[int] | None, folder: Path
) -> list[tuple[int, int]]:
    if cut is None:
        try:
            return chain_partition([1.0] * layers, stages)
        except ValueError as error:
            raise SpecError(f"{folder}: {error}") from error
    edges = [0, *cut, layers]
    if len(cut) != stages - 1 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise SpecError(
            f"{folder}: cut={list(cut)} must name the first layers of stages 1 to "
            f"{stages - 1}, ascending, from 1 to {layers - 1}"
        )
    return list(itertools.pairwise(edges))


def _example() -> Tensors:
    return {
        "input_ids": torch.full((1, EXAMPLE_TOKENS), 100, dtype=torch.int64),
        "attention_mask": torch.ones((1, EXAMPLE_TOKENS), dtype=torch.int64),
    }


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{path}: {error}; give the folder of a Hugging Face model"
        ) from error
    return found


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
"""What architectures call these numbers."""


def _number(config: dict[str, Any], names: Sequence[str], folder: Path) -> int:
    for name in names:
        if name in config:
            return int(config[name])
    raise SpecError(f"{folder}/config.json has none of {', '.join(names)}")


def _datatype(dtype: str, folder: Path) -> str:
    if dtype not in DATATYPES:
        known = ", ".join(DATATYPES)
        raise SpecError(f"{folder}: dtype {dtype!r} is not one of {known}")
    return DATATYPES[dtype]


def _pooling(folder: Path) -> str | None:
    """Return how a sentence encoder's rows become one: "mean" or "cls"."""
    if not (folder / "modules.json").exists():
        return None
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return None
    settings = _json(path)
    if settings.get("pooling_mode_mean_tokens"):
        return "mean"
    if settings.get("pooling_mode_cls_token"):
        return "cls"
    raise SpecError(f"{path}: only mean and cls pooling are known")


def _max_length(folder: Path, config: dict[str, Any]) -> int:
    path = folder / "sentence_bert_config.json"
    length = _json(path).get("max_seq_length") if path.exists() else None
    return int(length or config.get("max_position_embeddings") or 512)


MAX_CHARACTERS_PER_TOKEN = 64
"""So many characters a token are looked at: the tokenizer reads all it is given, and
throws away what is over the model's length. The longest English words are 45."""


class Tokenizer:
    """Turns text into ``input_ids`` and ``attention_mask`` of one row."""

    def __init__(self, folder: Path, max_length: int) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(folder / "tokenizer.json"))
        self._fast.no_padding()
        self._fast.enable_truncation(max_length)
        self._max_characters = max_length * MAX_CHARACTERS_PER_TOKEN

    def encode(self, text: str) -> Tensors:
        """Return the inputs of one text."""
        ids = self._fast.encode(text[: self._max_characters]).ids
        return {
            "input_ids": torch.tensor([ids], dtype=torch.int64),
            "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64),
        }
