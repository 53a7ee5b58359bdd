"""A decoder in a Hugging Face folder, cut between layers. Every process of the service
imports this module, so it imports nothing heavy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from multiworld.errors import SpecError
from multiworld.serve.generation.models import folder_facts
from multiworld.serve.models import huggingface, stored_integers, weights
from multiworld.serve.models.partition import Span
from multiworld.serve.spec.stage import Generation, Model, Stage, StageContext

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes per number


def model(
    path: str,
    stages: int = 1,
    cut: Sequence[int] | None = None,  # first layer of every stage but the first
    dtype: str | None = None,  # None: as in the folder, or float32 if quantized
    deterministic: bool = False,  # bit-identical outputs under all conditions
    # ``int8``: weights of a byte, products with exact sums.
    quantization: str | None = None,
    generation_config: str = "auto",  # sampling defaults of the folder; none: OpenAI's
) -> Model:
    """Return the decoder in a folder, cut into stages between layers."""
    folder = Path(path).expanduser()
    config = huggingface.read_json(folder / "config.json")
    stored_integers.check_config(folder, config, quantization)
    layers = huggingface.number_of(config, huggingface.LAYERS, folder)
    # By default the numbers of layers are as equal as possible.
    cuts = huggingface.cuts_of(layers, stages, cut, folder)
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    dtype = dtype or ("float32" if quantization else stored)
    if dtype not in SIZES:
        raise SpecError(f"{folder}: dtype {dtype!r} is not one of {', '.join(SIZES)}")
    if deterministic and config.get("attn_logit_softcapping"):
        raise SpecError(
            f"{folder}: the model caps the scores of its attention, which cannot be "
            "deterministic here; remove `deterministic: true`"
        )
    folder_facts.check_kinds(config.get("layer_types") or (), folder)
    folder_facts.check_tokenizer(folder)
    token = _kv_numbers(config, folder) * SIZES[dtype]
    return Model(
        stages=[
            Stage(
                load=functools.partial(
                    _load, folder, Span(begin, end, layers), dtype, quantization
                ),
                name=huggingface.title_of(begin, end),
            )
            for begin, end in cuts
        ],
        preload=[
            *huggingface.preloaded_modules(str(config.get("model_type", ""))),
            "multiworld.serve.generation.models.decoder_stage",
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
            end_tokens=folder_facts.end_tokens(config, folder),
            vocabulary=huggingface.number_of(config, ("vocab_size",), folder),
            max_tokens=huggingface.longest_of(config, folder_facts.MAX_TOKENS),
            kv_bytes=[(end - begin) * token for begin, end in cuts],
            weights=functools.partial(
                weights.name_of, folder, dtype, deterministic, quantization
            ),
            dtype=dtype,
            weight_bytes=weights.bytes_by_stage(folder, cuts),
            defaults=folder_facts.defaults(folder, generation_config),
        ),
    )


def _kv_numbers(config: dict[str, Any], folder: Path) -> int:
    """Return the size of one token's key and value in one layer, in numbers."""
    heads = huggingface.number_of(config, ("num_attention_heads", "n_head"), folder)
    if (nope := config.get("qk_nope_head_dim")) is not None:  # latent, kept expanded
        key = int(nope) + int(config.get("qk_rope_head_dim") or 0)
        return heads * (key + int(config.get("v_head_dim") or key))
    hidden = huggingface.number_of(config, huggingface.HIDDEN, folder)
    size = int(config.get("head_dim") or hidden // heads)
    return 2 * size * int(config.get("num_key_value_heads") or heads)


def _load(
    folder: Path,
    span: Span,
    dtype: str,
    quantization: str | None,
    context: StageContext,
) -> Callable[..., Any]:
    from multiworld.serve.generation.models import decoder_stage

    return decoder_stage.load(folder, span, dtype, context.device, quantization)
