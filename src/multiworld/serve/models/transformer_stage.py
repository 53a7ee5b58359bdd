"""One stage of a transformers model: by layer ownership, on transformers' own loader.

The model's class is derived from: what another stage owns is replaced in ``__init__``
by something without weights. ``from_pretrained`` then builds it on ``meta`` and reads
what is left, and nothing else, with all that it knows of renamed and fused weights and
of buffers that are in no file.

What stands before, in and after the chain of layers is named by the model's
``base_model_pp_plan``, where it has one, and by tables here for older architectures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.errors import SpecError
from multiworld.serve.models.span import Span
from multiworld.serve.spec.stage import Tensors

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TESTED = (
    "bert, distilbert, electra, modernbert, mpnet, roberta, xlm-roberta; "
    "falcon, gemma, gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, mixtral, "
    "opt, phi3, qwen2, qwen3"
)
"""Architectures (``model_type``) that tests compare with the whole model."""

CHAINS = ("encoder.layer", "layers", "h", "transformer.layer", "decoder.layers")
EMBEDDINGS = ("embeddings",)
POSITIONS = ("wpe", "decoder.embed_positions")
TOKENS = (
    "wte",
    "word_embeddings",
    "decoder.embed_tokens",
    "decoder.project_in",
    "embeddings_project",
)
AFTER = (
    "ln_f",
    "final_norm",
    "pooler",
    "decoder.final_layer_norm",
    "decoder.project_out",
)
"""Where architectures without a plan keep their layers; what embeds (and takes
``inputs_embeds`` itself); what is added to what was embedded; what comes in has
been through; and what comes after the last layer."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Names of modules."""

    chain: str
    embeddings: Sequence[str] = ()
    positions: Sequence[str] = ()
    tokens: Sequence[str] = ()
    after: Sequence[str] = ()


class PassEmbeddings(nn.Module):
    """Stands where the embeddings were: what comes in has been embedded."""

    def forward(
        self,
        input_ids: None,
        inputs_embeds: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return what came in."""
        assert inputs_embeds is not None
        return inputs_embeds


class NoPositions(nn.Module):
    """Stands where positions were looked up: they have been added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return what changes nothing when it is added."""
        return torch.zeros(())


class Identity(nn.Module):
    """Stands where something was that another stage does."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what came in."""
        return hidden


def load(
    folder: Path, span: Span, dtype: str, pooling: str | None, device: str
) -> LayerPart:
    """Build and load the part of a model that has the layers of ``span``.

    Args:
        dtype: What it computes in.
        pooling: ``mean`` or ``cls``: how the rows of a sentence become one.
        device: Where to.

    Raises:
        SpecError: transformers does not know the architecture, it has no chain of
            layers that is known here, or the folder lacks weights.
    """
    from transformers import MODEL_MAPPING, AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if config.is_encoder_decoder:
        raise SpecError(
            f"{folder}: {config.model_type} has an encoder and a decoder, which is no "
            "chain; write a factory that returns its stages"
        )
    try:
        kind = MODEL_MAPPING[type(config)]
    except KeyError as error:
        raise SpecError(
            f"{folder}: transformers has no plain model for {config.model_type}"
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    owned = _owned_class(kind, span, folder)
    whole, info = owned.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        dtype=getattr(torch, dtype),
        output_loading_info=True,
    )
    # A folder without a pooler's weights is one whose pooler nobody uses.
    missing = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    if missing:
        raise SpecError(f"{folder} lacks the weights of {sorted(missing)[:3]} …")
    _drop_other_layers(whole, span, _anatomy(whole, folder).chain)
    return LayerPart(whole, span, pooling).to(device).eval()


def _owned_class(kind: Any, span: Span, folder: Path) -> Any:
    class Owned(kind):  # type: ignore[misc]
        """The model, without the weights of other stages."""

        # Those are what is left in the files.
        _keys_to_ignore_on_load_unexpected = (r".*",)

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            strip(self, span, _anatomy(self, folder))

    # transformers looks by these for what it knows of a model's weights.
    Owned.__name__ = Owned.__qualname__ = kind.__name__
    Owned.__module__ = kind.__module__
    return Owned


def _anatomy(whole: nn.Module, folder: Path) -> Anatomy:
    plan = getattr(whole.config, "base_model_pp_plan", None)
    return anatomy_from_plan(plan) if plan else _anatomy_from_tables(whole, folder)


def anatomy_from_plan(plan: dict[str, Any]) -> Anatomy:
    """Read a ``base_model_pp_plan``: modules in order, with their inputs and outputs.

    The chain is what takes the attention mask.
    """
    names = list(plan)
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
        f"{folder}: {type(whole).__name__} has no chain of layers that is known here "
        f"({', '.join(CHAINS)}; tested are {TESTED}); write a factory that returns its "
        "stages"
    )


def strip(whole: nn.Module, span: Span, anatomy: Anatomy) -> None:
    """Replace what other stages own by modules without weights; numbers stay."""
    chain = whole.get_submodule(anatomy.chain)
    assert isinstance(chain, nn.ModuleList)
    for number in range(span.count):
        if not span.begin <= number < span.end:
            chain[number] = Identity()
    if not span.is_first:
        _replace(whole, anatomy.embeddings, PassEmbeddings)
        _replace(whole, anatomy.positions, NoPositions)
        _replace(whole, anatomy.tokens, Identity)
    if not span.is_last:
        _replace(whole, anatomy.after, Identity)


def _replace(whole: nn.Module, names: Sequence[str], kind: type[nn.Module]) -> None:
    for name in names:
        parent, _, last = name.rpartition(".")
        holder = whole.get_submodule(parent)
        if getattr(holder, last) is not None:
            setattr(holder, last, kind())


def _drop_other_layers(whole: nn.Module, span: Span, name: str) -> None:
    """Take the layers of other stages out of the chain, and out of what goes by them.

    They stay in it until the weights are loaded, whose names have their numbers.
    """
    chain = whole.get_submodule(name)
    assert isinstance(chain, nn.ModuleList)
    for number in reversed(range(span.count)):
        if not span.begin <= number < span.end:
            del chain[number]
    config: Any = whole.config
    config.num_hidden_layers = span.end - span.begin
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = kinds[span.begin : span.end]


class LayerPart(nn.Module):
    """A part of a model as a stage: a dict of tensors in, a dict of tensors out."""

    def __init__(self, whole: nn.Module, span: Span, pooling: str | None) -> None:
        super().__init__()
        self.whole, self._span, self._pooling = whole, span, pooling

    def forward(self, tensors: Tensors) -> Tensors:
        """Compute the layers."""
        mask = tensors["attention_mask"]
        if self._span.is_first:
            given = {"input_ids": tensors["input_ids"]}
        else:
            given = {"inputs_embeds": tensors["hidden"]}
        hidden = self.whole(**given, attention_mask=mask).last_hidden_state
        if not self._span.is_last:
            return {"hidden": hidden, "attention_mask": mask}
        if self._pooling is None:
            return {"last_hidden_state": hidden}
        return {"embedding": self._pooled(hidden, mask)}

    def _pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        if self._pooling == "cls":
            pooled = hidden[:, 0]
        else:
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(pooled, dim=-1)
