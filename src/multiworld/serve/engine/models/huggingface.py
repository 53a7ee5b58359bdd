"""A transformer in a Hugging Face folder, cut between layers: an encoder (BERT and its
relatives), or a decoder without a cache. Every process imports this module, so it
imports nothing heavy but torch. Nothing is downloaded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from multiworld.errors import InvalidRequestError, SpecError
from multiworld.serve.engine.models import padding_check
from multiworld.serve.engine.models.padding_check import UNPADDED, Sizes
from multiworld.serve.engine.models.partition import Span, chain_partition
from multiworld.serve.engine.models.pooling import Pooling
from multiworld.serve.engine.models.stored_integers import check_config
from multiworld.serve.spec.stage import Model, Stage, StageContext, Tensors, TensorSpec
from multiworld.serve.text.folder_json import read_if_there, read_json
from multiworld.serve.text.text_inputs import Tokenizer

# Number of tokens in the example: about one sentence, as in typical requests.
EXAMPLE_TOKENS = 24

# Datatypes of the Open Inference Protocol, by the dtype names in ``config.json``.
DATATYPES = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}


def model(
    path: str,
    stages: int = 1,
    # Maximum number of tokens of a text; None: the folder's.
    max_length: int | None = None,
    # First layers of all stages but the first; None: stages get equal numbers of
    # layers.
    cut: Sequence[int] | None = None,
    # Dtype to compute in; None: the folder's, or ``float32`` with int8.
    dtype: str | None = None,
    # ``int8``: weights of one byte each, and matrix products with exact sums.
    quantization: str | None = None,
) -> Model:
    """Return the model in a folder, cut into stages between layers.

    Inputs are ``input_ids`` and ``attention_mask``, [rows, length], int64. A sentence
    encoder (a folder with ``modules.json``) returns ``embedding``, [rows, hidden],
    pooled and normalized as its folder specifies. Other models return
    ``last_hidden_state``, [rows, length, hidden].
    """
    folder = Path(path).expanduser()
    config = read_json(folder / "config.json")
    layers = number_of(config, LAYERS, folder)
    cuts = cuts_of(layers, stages, cut, folder)
    pooling = _pooling(folder)
    hidden = number_of(config, HIDDEN, folder)
    if quantization not in (None, "int8"):
        raise SpecError(f"{folder}: quantization {quantization!r} is not int8")
    check_config(folder, config, quantization)
    dtype = dtype_of(config, dtype, quantization, folder)
    datatype = DATATYPES[dtype]
    output = (
        TensorSpec("embedding", datatype, (-1, hidden))
        if pooling
        else TensorSpec("last_hidden_state", datatype, (-1, -1, hidden))
    )
    vocabulary = int(config.get("vocab_size", 2**31))
    longest = longest_of(config, 2**31)
    kind, pad = str(config.get("model_type", "")), config.get("pad_token_id")
    if kind == "big_bird" and config.get("attention_type") != "original_full":
        # A short text would change the attention of all later ones.
        raise SpecError(
            f'{folder}: set "attention_type": "original_full" in config.json'
        )
    padding = {
        "input_ids": pad if isinstance(pad, int) and 0 <= pad < vocabulary else 0,
        "attention_mask": 0,
        "hidden": 0.0,
        "last_hidden_state": 0.0,
    }
    made = [
        Stage(
            load=functools.partial(
                _load_stage,
                folder,
                Span(begin, end, layers),
                dtype,
                pooling,
                quantization,
                Sizes(vocabulary, hidden, longest, padding["input_ids"]),
            ),
            name=title_of(begin, end),
            ragged={} if kind in UNPADDED else padding,
        )
        for begin, end in cuts
    ]
    tokens = min(max_length or max_length_of(folder, config), longest)
    return Model(
        stages=made,
        inputs=[
            TensorSpec("input_ids", "INT64", (-1, -1)),
            TensorSpec("attention_mask", "INT64", (-1, -1)),
        ],
        outputs=[output],
        example=functools.partial(example, vocabulary, longest),
        check=functools.partial(check_ids, vocabulary, longest),
        text=functools.partial(Tokenizer, folder, tokens) if pooling else None,
        notes=_notes(config, folder),
        preload=preloaded_modules(kind),
        parts=functools.partial(
            model, path, layers, max_length, dtype=dtype, quantization=quantization
        ),
    )


def title_of(begin: int, end: int) -> str:
    """Return the name of a stage with the layers ``begin`` to ``end`` (exclusive)."""
    return f"layer {begin}" if end == begin + 1 else f"layers {begin}-{end - 1}"


def check_ids(vocabulary: int, longest: int, tensors: Tensors) -> None:
    """Reject token ids and lengths that exceed the embedding tables."""
    ids, mask = tensors["input_ids"], tensors["attention_mask"]
    if ids.shape != mask.shape:
        raise InvalidRequestError(
            f"input_ids has shape {list(ids.shape)} and attention_mask "
            f"{list(mask.shape)}; give them the same shape"
        )
    if ids.shape[1] > longest:
        raise InvalidRequestError(
            f"input_ids has {ids.shape[1]} tokens per row; the model takes at most "
            f"{longest}",
            param="input",
            code="context_length_exceeded",
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise InvalidRequestError(
            f"input_ids has tokens from {low} to {high}; the vocabulary has 0 to "
            f"{vocabulary - 1}"
        )
    if ((mask != 0) & (mask != 1)).any():  # some models compute positions from it
        raise InvalidRequestError("attention_mask has values other than 0 and 1")


# Suffixes of the names of classes with a head. Heads are not served.
HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForSequenceClassification")


def _notes(config: dict[str, Any], folder: Path) -> list[str]:
    found = [a for a in config.get("architectures") or () if a.endswith(HEADS)]
    notes = [
        f"the head of {name} is not served: the outputs are hidden states, not logits"
        for name in found
    ]
    path = folder / "config_sentence_transformers.json"
    if name := read_if_there(path).get("default_prompt_name"):
        notes.append(
            f"the model's default prompt ({name}) is not prepended to inputs; clients "
            "must send it"
        )
    return notes


def preloaded_modules(model_type: str) -> list[str]:
    """Return the slow imports of an architecture's stages, for preloading."""
    found = [
        "multiworld.serve.engine.models.transformer_stage",
        "multiworld.serve.engine.models.conversions",
        "safetensors.torch",
        "tokenizers",
        "transformers.models.auto.modeling_auto",
    ]
    if model_type.isidentifier():
        found.append(f"transformers.models.{model_type}.modeling_{model_type}")
    return found


def cuts_of(
    layers: int, stages: int, cut: Sequence[int] | None, folder: Path
) -> list[tuple[int, int]]:
    """Return the first layer and end (exclusive) of each stage."""
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


def example(vocabulary: int, longest: int) -> Tensors:
    """Return example inputs for a vocabulary and a maximum length."""
    size = 1, min(EXAMPLE_TOKENS, longest)
    return {
        "input_ids": torch.full(size, min(100, vocabulary - 1), dtype=torch.int64),
        "attention_mask": torch.ones(size, dtype=torch.int64),
    }


# Names of the field for the number of layers in ``config.json``; architectures differ.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# Names of the field for the hidden size in ``config.json``; architectures differ.
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")


def number_of(config: dict[str, Any], names: Sequence[str], folder: Path) -> int:
    for name in names:
        if name in config:
            return int(config[name])
    raise SpecError(
        f"{folder}/config.json has none of {', '.join(names)}, so this kind of model "
        "cannot be cut into stages here; use an engine, or write a factory that "
        "returns its stages"
    )


# Architectures whose positions start at the padding token's number plus one.
COUNTED_FROM_PADDING = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


def configured_length(config: dict[str, Any], default: int) -> int:
    """Return the maximum length of a sequence in tokens, or ``default``."""
    found = config.get("max_position_embeddings") or config.get("n_positions")
    if found and config.get("model_type") in COUNTED_FROM_PADDING:
        return int(found) - int(config.get("pad_token_id") or 1) - 1
    return int(found or default)


# Kinds of rotary embeddings that change for all rows of a step as soon as one of its
# sequences is longer than the original maximum.
CHANGING = ("longrope", "su", "dynamic")


def longest_of(config: dict[str, Any], default: int) -> int:
    """Return the maximum length at which a sequence does not change the rotary
    embeddings of other sequences in its step."""
    found = configured_length(config, default)
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for rope in (ropes, *(r for r in ropes.values() if isinstance(r, dict))):
        if rope.get("rope_type", rope.get("type")) in CHANGING:
            name = "original_max_position_embeddings"
            found = min(found, int(rope.get(name) or config.get(name) or found))
    return found


def dtype_of(
    config: dict[str, Any], asked: str | None, quantization: str | None, folder: Path
) -> str:
    """Return the dtype to compute in: by default the folder's, or float32 with int8."""
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    found = asked or ("float32" if quantization else stored)
    if found not in DATATYPES:
        known = ", ".join(DATATYPES)
        raise SpecError(f"{folder}: dtype {found!r} is not one of {known}")
    return found


def _pooling(folder: Path) -> Pooling | None:
    path = folder / "modules.json"
    if not path.exists():
        return None
    modules: Any = read_json(path)
    kinds = {str(m.get("type", "")).rpartition(".")[2]: m for m in modules}
    others = sorted(kinds.keys() - {"Transformer", "Pooling", "Normalize"})
    if others:
        raise SpecError(
            f"{path}: modules of type {', '.join(others)} are not supported; write a "
            "factory that returns the stages of this model"
        )
    if "Pooling" not in kinds:
        return None
    path = folder / str(kinds["Pooling"].get("path", "1_Pooling")) / "config.json"
    settings = read_json(path)
    modes = [n for n, v in settings.items() if n.startswith("pooling_mode_") and v]
    if modes in (["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
        return Pooling(modes[0].split("_")[2], "Normalize" in kinds)
    raise SpecError(f"{path}: this pooling is not supported; use mean or cls pooling")


def max_length_of(folder: Path, config: dict[str, Any]) -> int:
    path = folder / "sentence_bert_config.json"
    length = read_if_there(path).get("max_seq_length")
    longest = configured_length(config, int(length or 512))
    return min(int(length or longest), longest)


def _load_stage(
    folder: Path,
    span: Span,
    dtype: str,
    pooling: Pooling | None,
    quantization: str | None,
    sizes: Sizes,
    context: StageContext,
) -> Callable[[Tensors], Tensors]:
    from multiworld.serve.engine.models import transformer_stage

    device = context.device
    if quantization and device != "cpu":
        raise SpecError(
            f"{folder}: quantization: int8 is for CPUs only, not for {device}; remove "
            "it, or `device`"
        )
    part = transformer_stage.load(folder, span, dtype, pooling, device, quantization)
    padding_check.check_stage(part, span, sizes, dtype, device, folder)
    return part
