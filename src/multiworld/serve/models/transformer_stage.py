"""One stage of a transformers model, loaded by transformers' own loader.

A subclass of the model's class replaces the modules of other stages with modules
without weights; ``from_pretrained`` builds the rest on ``meta`` and reads only its
weights. So its handling of renamed and fused weights, and of buffers that are in no
file, still applies.

The model's ``base_model_pp_plan`` names the modules before, in and after the chain of
layers; tables name them for older architectures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from multiworld.errors import SpecError
from multiworld.serve.models.experts import split_experts
from multiworld.serve.models.huggingface import Pooling
from multiworld.serve.models.integer_linear import is_linear, quantize_linears
from multiworld.serve.models.partition import Span
from multiworld.serve.models.stored_integers import Stored, read_stored
from multiworld.serve.models.weights import LAYER, names_in
from multiworld.serve.spec.stage import Tensors

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Architectures (``model_type``) whose stages tests compare with the whole model.
TESTED = (
    "bert, distilbert, electra, modernbert, mpnet, roberta, xlm-roberta; "
    "falcon, gemma, gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, mixtral, "
    "opt, phi3, qwen2, qwen3"
)

COMPARED = frozenset(TESTED.replace(";", ",").split(", "))

# Names of the chain of layers in architectures without a plan.
CHAINS = ("encoder.layer", "layers", "h", "transformer.layer", "decoder.layers")

EMBEDDINGS = ("embeddings",)  # they take ``inputs_embeds`` themselves
POSITIONS = ("wpe", "decoder.embed_positions")  # added to the token embeddings

# Names of token embeddings and projections, which precede ``inputs_embeds``.
TOKENS = (
    "wte",
    "word_embeddings",
    "decoder.embed_tokens",
    "decoder.project_in",
    "embeddings_project",
)

# Names of modules after the last layer.
AFTER = (
    "ln_f",
    "final_norm",
    "norm",
    "final_layernorm",
    "layer_norm",
    "layernorm",
    "encoder.ln",
    "encoder.LayerNorm",
    "encoder.emb_layer_norm_after",
    "pooler",
    "decoder.final_layer_norm",
    "decoder.project_out",
)

# Names of factors of the embeddings, applied to ``inputs_embeds`` too.
FACTORS = ("embedding_multiplier",)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Names of the modules before, in and after the chain of layers."""

    chain: str
    embeddings: Sequence[str] = ()
    positions: Sequence[str] = ()
    tokens: Sequence[str] = ()
    after: Sequence[str] = ()


class PassEmbeddings(nn.Module):
    """Replaces the embeddings of another stage; the input is already embedded."""

    def forward(
        self,
        input_ids: None,
        inputs_embeds: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        assert inputs_embeds is not None
        return inputs_embeds


class NoPositions(nn.Module):
    """Replaces the position embeddings of another stage; they are already added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a scalar zero, which changes nothing when it is added."""
        return torch.zeros(())


class Identity(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def load(
    folder: Path,
    span: Span,
    dtype: str,
    pooling: Pooling | None,  # of sentence encoders
    device: str,
    quantization: str | None = None,
) -> LayerPart:
    """Load the part of a model that has the layers of a span."""
    from transformers import MODEL_MAPPING, AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.is_encoder_decoder:
        raise SpecError(
            f"{folder}: {config.model_type} has an encoder and a decoder, not one "
            "chain of layers; write a factory that returns its stages"
        )
    try:
        kind = MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise SpecError(
            f"{folder}: transformers has no base model for {config.model_type}; "
            "write a factory that returns its stages"
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    whole = load_owned(folder, kind, config, span, dtype, quantization)
    return LayerPart(whole, span, pooling).to(device).eval()


def load_owned(
    folder: Path,
    kind: Any,
    config: Any,
    span: Span,
    dtype: str,
    quantization: str | None = None,
) -> Any:
    """Load the layers of a span as transformers' class ``kind``; changes ``config``."""
    from transformers.utils import logging

    disable: Any = logging.disable_progress_bar  # of little use for a part
    disable()
    is_cut = span.end - span.begin < span.count
    if is_cut and config.model_type not in COMPARED:
        from multiworld.serve.models import cut_check

        cut_check.check(kind, config, folder)
    owned = _owned_class(kind, span, folder)
    wanted = getattr(torch, dtype)
    is_int8 = quantization == "int8"
    if is_int8 and hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers would need compressed-tensors
    whole, info = owned.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        # In the folder's dtype weights never take more memory than there.
        dtype=(config.dtype or wanted) if is_int8 else wanted,
        output_loading_info=True,
    )
    stored = _stored(folder, whole, span) if is_int8 else {}
    by_module = {whole.get_submodule(name): stored[name] for name in stored}
    # If a folder has no weights for the pooler, the pooler's output is not used.
    known = ("pooler.", *(f"{name}.weight" for name in stored))
    missing = [name for name in info["missing_keys"] if not name.startswith(known)]
    if missing:
        raise SpecError(
            f"{folder} lacks the weights of {sorted(missing)[:3]} …; save it again"
        )
    base = whole.base_model
    _drop_other_layers(base, span, anatomy_of(base, folder).chain)
    if is_int8:
        split_experts(whole)
        quantize_linears(whole, by_module)
        for parameter in whole.parameters():  # not buffers, such as rotary frequencies
            parameter.data = parameter.data.to(wanted)
    return whole


def _stored(folder: Path, whole: Any, span: Span) -> dict[str, Stored]:
    """Return weights that the folder has in int8, by module; others are refused."""
    # A model without a head has the names of the folder without their prefix.
    prefix = f"{whole.base_model_prefix}."
    linears: list[str] = []
    others: list[str] = []
    for name, module in whole.named_modules():
        names = linears if is_linear(module) else others
        names += [name, prefix + name]
    known = {*linears}
    for name in names_in(folder):
        module, _, last = name.rpartition(".")
        if last != "weight_scale" or module in known:
            continue
        layer = LAYER.search(name)
        if module in others or (layer and span.begin <= int(layer[1]) < span.end):
            raise SpecError(
                f"{folder}: {name} is of no matrix product that can be loaded in int8 "
                "(experts of a mixture cannot); use the model with float weights"
            )
    found = read_stored(folder, linears)
    return {
        name: found.get(name) or found[prefix + name]
        for name in linears[::2]
        if name in found or prefix + name in found
    }


def _owned_class(kind: Any, span: Span, folder: Path) -> Any:
    class Owned(kind):  # type: ignore[misc]
        # The weights of other stages are in the files, too. A list, because
        # transformers 5.0 adds one to it.
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r".*"]

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            base = self.base_model
            # A head that shares its weights with the embeddings needs them, too.
            is_shared = base is not self and config.tie_word_embeddings
            strip(base, span, anatomy_of(base, folder), keeps_tokens=is_shared)

    # transformers finds its conversions of weights by these names.
    Owned.__name__ = Owned.__qualname__ = kind.__name__
    Owned.__module__ = kind.__module__
    return Owned


def anatomy_of(whole: nn.Module, folder: Path) -> Anatomy:
    plan = getattr(whole.config, "base_model_pp_plan", None)
    return anatomy_from_plan(plan) if plan else _anatomy_from_tables(whole, folder)


def anatomy_from_plan(plan: dict[str, Any]) -> Anatomy:
    """Return the anatomy that a ``base_model_pp_plan`` describes."""
    names = list(plan)
    # The first module that takes the attention mask.
    chain = next(n for n in names if "attention_mask" in plan[n][0])
    at = names.index(chain)
    tokens = [name for name in names[:at] if "input_ids" in plan[name][0]]
    return Anatomy(chain=chain, tokens=tokens, after=names[at + 1 :])


def _anatomy_from_tables(whole: nn.Module, folder: Path) -> Anatomy:
    present = dict(whole.named_modules())
    for chain in CHAINS:
        if isinstance(present.get(chain), nn.ModuleList):
            return Anatomy(
                chain,
                *(
                    [name for name in names if name in present]
                    for names in (EMBEDDINGS, POSITIONS, TOKENS, AFTER)
                ),
            )
    raise SpecError(
        f"{folder}: {type(whole).__name__} has no chain of layers that is known "
        f"({', '.join(CHAINS)}; tested are {TESTED}); write a factory that returns its "
        "stages"
    )


def strip(
    whole: nn.Module, span: Span, anatomy: Anatomy, *, keeps_tokens: bool = False
) -> None:
    """Replace the modules of other stages with some without weights, in place."""
    chain = whole.get_submodule(anatomy.chain)
    assert isinstance(chain, nn.ModuleList)
    # The other layers keep their numbers, which are in the names of weights.
    for number in range(span.count):
        if not span.begin <= number < span.end:
            chain[number] = Identity()
    if not span.is_first:
        _replace(whole, anatomy.embeddings, PassEmbeddings)
        _replace(whole, anatomy.positions, NoPositions)
        if not keeps_tokens:  # they are used if ``input_ids`` are given
            _replace(whole, anatomy.tokens, Identity)
        for name in FACTORS:
            if hasattr(whole, name):
                setattr(whole, name, 1.0)
    if not span.is_last:
        _replace(whole, anatomy.after, Identity)


def _replace(whole: nn.Module, names: Sequence[str], kind: type[nn.Module]) -> None:
    for name in names:
        parent, _, last = name.rpartition(".")
        holder = whole.get_submodule(parent)
        if getattr(holder, last) is not None:
            setattr(holder, last, kind())


def _drop_other_layers(whole: nn.Module, span: Span, name: str) -> None:
    """Remove the layers of other stages from the chain and from the config."""
    chain = whole.get_submodule(name)
    assert isinstance(chain, nn.ModuleList)
    # Not before the weights are loaded: their names have the layers' numbers.
    for number in reversed(range(span.count)):
        if not span.begin <= number < span.end:
            del chain[number]
    config: Any = whole.config
    config.num_hidden_layers = span.end - span.begin
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = kinds[span.begin : span.end]


class LayerPart(nn.Module):
    """A part of a model as a stage: takes and returns a dict of tensors."""

    def __init__(self, whole: nn.Module, span: Span, pooling: Pooling | None) -> None:
        super().__init__()
        self.whole, self._span, self._pooling = whole, span, pooling

    def forward(self, tensors: Tensors) -> Tensors:
        """Compute the layers from ``input_ids`` or (later stages) ``hidden``."""
        mask = tensors["attention_mask"]
        if self._span.is_first:
            given = {"input_ids": tensors["input_ids"]}
        else:
            given = {"inputs_embeds": tensors["hidden"]}
        # [rows, length, hidden]
        hidden = self.whole(**given, attention_mask=mask).last_hidden_state
        if not self._span.is_last:
            return {"hidden": hidden, "attention_mask": mask}
        if self._pooling is None:
            return {"last_hidden_state": hidden}
        pooled = _pooled(hidden, mask, self._pooling.kind)
        if self._pooling.is_normalized:
            pooled = nn.functional.normalize(pooled, dim=-1)
        return {"embedding": pooled}


def _pooled(hidden: Tensor, mask: Tensor, kind: str) -> Tensor:
    if kind == "cls":
        return hidden[:, 0]
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
