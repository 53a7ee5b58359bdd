"""A decoder in a Hugging Face folder, cut between layers. Every process of the service
imports this module, so it imports nothing heavy but torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from multiworld.errors import SpecError
from multiworld.serve.engine.models import (
    folder_facts,
    huggingface,
    stored_integers,
    weights,
)
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.spec.stage import Generation, Model, Stage, StageContext
from multiworld.serve.text import tokenizer_files
from multiworld.serve.text.folder_json import read_json

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes of a number


def model(
    path: str,
    stages: int = 1,
    cut: Sequence[int] | None = None,  # first layers of all stages but the first
    dtype: str | None = None,  # None: as in the folder, or float32 if quantized
    deterministic: bool = False,  # bit-identical outputs under all conditions
    # ``int8``: weights of one byte each, and matrix products with exact sums.
    quantization: str | None = None,
    # "auto": use the folder's defaults for sampling; "none": use OpenAI's.
    generation_config: str = "auto",
) -> Model:
    """Return the decoder in a folder, cut into stages between layers."""
    folder = Path(path).expanduser()
    config = read_json(folder / "config.json")
    stored_integers.check_config(folder, config, quantization)
    layers = huggingface.number_of(config, huggingface.LAYERS, folder)
    # Unless ``cut`` is given, the stages get about equal numbers of layers.
    cuts = huggingface.cuts_of(layers, stages, cut, folder)
    dtype = huggingface.dtype_of(config, dtype, quantization, folder)
    if deterministic and config.get("attn_logit_softcapping"):
        raise SpecError(
            f"{folder}: the model has softcapped attention logits, which "
            "`deterministic: true` does not support; remove it"
        )
    if config.get("model_type") in huggingface.COUNTED_FROM_PADDING:
        raise SpecError(
            f"{folder}: {config['model_type']} counts positions from its padding "
            "token, so it cannot generate in steps here; use an engine, or another "
            "model"
        )
    folder_facts.check_kinds(config.get("layer_types") or (), folder)
    folder_facts.check_tokenizer(folder)
    kv_numbers = [
        sum(_kv_numbers(config, layer, folder) for layer in range(begin, end))
        for begin, end in cuts
    ]
    return Model(
        stages=[
            Stage(
                load=functools.partial(
                    _load,
                    folder,
                    Span(begin, end, layers),
                    dtype,
                    quantization,
                    numbers,
                ),
                name=huggingface.title_of(begin, end),
            )
            for (begin, end), numbers in zip(cuts, kv_numbers, strict=True)
        ],
        preload=[
            *huggingface.preloaded_modules(str(config.get("model_type", ""))),
            "multiworld.serve.engine.models.decoder_stage",
        ],
        parts=functools.partial(
            model,
            path,
            layers,
            dtype=dtype,
            deterministic=deterministic,
            quantization=quantization,
        ),
        generation=Generation(
            tokenizer=functools.partial(folder_facts.tokenizer, folder),
            end_tokens=tokenizer_files.end_tokens(config, folder),
            vocabulary=huggingface.number_of(config, ("vocab_size",), folder),
            max_tokens=huggingface.longest_of(config, folder_facts.MAX_TOKENS),
            kv_bytes=[numbers * SIZES[dtype] for numbers in kv_numbers],
            weights=functools.partial(
                weights.name_of, folder, dtype, deterministic, quantization
            ),
            dtype=dtype,
            weight_bytes=weights.bytes_by_stage(folder, cuts),
            defaults=folder_facts.defaults(folder, generation_config),
        ),
    )


def _kv_numbers(config: dict[str, Any], layer: int, folder: Path) -> int:
    """Return how many numbers the key and the value of a token have in a layer."""
    config = {**config, **_of_layer(config, layer)}
    heads = huggingface.number_of(config, ("num_attention_heads", "n_head"), folder)
    if (nope := config.get("qk_nope_head_dim")) is not None:
        # Latent attention, whose keys and values are cached in expanded form.
        key = int(nope) + int(config.get("qk_rope_head_dim") or 0)
        return heads * (key + int(config.get("v_head_dim") or key))
    hidden = huggingface.number_of(config, huggingface.HIDDEN, folder)
    size = int(config.get("head_dim") or config.get("kv_channels") or hidden // heads)
    kept = int(config.get("num_key_value_heads") or heads)
    if config.get("model_type") == "gpt_bigcode" and config.get("multi_query", True):
        # The config files of older versions lack ``multi_query``, which is then on.
        kept = 1
    if config.get("model_type") == "jetmoe":
        # The key and the value of a token are cached once for each of its experts.
        kept *= int(config.get("num_experts_per_tok", 1))
    return 2 * size * kept


def _of_layer(config: dict[str, Any], layer: int) -> dict[str, Any]:
    """Return the config values in which a layer differs from others, as in gemma4."""
    if (own := config.get("per_layer_config")) is not None:
        found: dict[str, Any] = own.get(str(layer)) or {}
        return found
    kinds = config.get("layer_types") or ()
    if layer >= len(kinds) or kinds[layer] != "full_attention":
        return {}
    found = {"head_dim": config.get("global_head_dim") or config.get("head_dim")}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        found["num_key_value_heads"] = config["num_global_key_value_heads"]
    return found


def _load(
    folder: Path,
    span: Span,
    dtype: str,
    quantization: str | None,
    kv_numbers: int,
    context: StageContext,
) -> Callable[..., Any]:
    from multiworld.serve.engine.models import decoder_stage

    device = context.device
    return decoder_stage.load(folder, span, dtype, device, quantization, kv_numbers)
