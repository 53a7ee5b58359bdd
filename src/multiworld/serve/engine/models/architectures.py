"""The parts of a transformers model before, in and after its chain of layers.

The model's ``base_model_pp_plan`` names the parts. For architectures without a plan,
tables here name them. ``strip`` replaces the parts of other stages with modules that
have no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.errors import SpecError
from multiworld.serve.engine.models.partition import Span

# Architectures (``model_type``) for which tests compare stages with the whole model.
TESTED = (
    "bert, distilbert, electra, modernbert, mpnet, roberta, xlm-roberta; "
    "falcon, gemma, gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, mixtral, "
    "opt, phi3, qwen2, qwen3"
)

COMPARED = frozenset(TESTED.replace(";", ",").split(", "))

# Possible names of the chain of layers, for architectures without a plan.
CHAINS = ("encoder.layer", "layers", "h", "transformer.layer", "decoder.layers")

EMBEDDINGS = ("embeddings",)  # modules that themselves take ``inputs_embeds``
# Modules whose outputs are added to the token embeddings.
POSITIONS = ("wpe", "decoder.embed_positions")

# Names of token embeddings and of projections after them. ``inputs_embeds`` replaces
# their output.
TOKENS = (
    "wte",
    "word_embeddings",
    "decoder.embed_tokens",
    "decoder.project_in",
    "embeddings_project",
)

# Names of modules that follow the last layer.
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

# Names of factors that models apply to the token embeddings, and also to
# ``inputs_embeds``. So later stages set these factors to 1.
FACTORS = ("embedding_multiplier",)


@dataclass(frozen=True, slots=True)
class Architecture:
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
        """Return a scalar zero, so that adding it changes nothing."""
        return torch.zeros(())


class Identity(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def architecture_of(whole: nn.Module, folder: Path) -> Architecture:
    plan = getattr(whole.config, "base_model_pp_plan", None)
    if not plan:
        return _anatomy_from_tables(whole, folder)
    found = anatomy_from_plan(plan)
    if found.chain not in dict(whole.named_modules()):
        raise _without_chain(whole, folder)
    return found


def anatomy_from_plan(plan: dict[str, Any]) -> Architecture:
    """Return the architecture that a ``base_model_pp_plan`` describes."""
    names = list(plan)
    # The chain of layers is the first module that takes the attention mask.
    chain = next(n for n in names if "attention_mask" in plan[n][0])
    at = names.index(chain)
    tokens = [name for name in names[:at] if "input_ids" in plan[name][0]]
    return Architecture(chain=chain, tokens=tokens, after=names[at + 1 :])


def _anatomy_from_tables(whole: nn.Module, folder: Path) -> Architecture:
    present = dict(whole.named_modules())
    # In DeBERTa, the norm applies to the relative embeddings, not after the layers.
    if "encoder.rel_embeddings" in present:
        present.pop("encoder.LayerNorm", None)
    for chain in CHAINS:
        if isinstance(present.get(chain), nn.ModuleList):
            return Architecture(
                chain,
                *(
                    [name for name in names if name in present]
                    for names in (EMBEDDINGS, POSITIONS, TOKENS, AFTER)
                ),
            )
    raise _without_chain(whole, folder)


def _without_chain(whole: nn.Module, folder: Path) -> SpecError:
    return SpecError(
        f"{folder}: {type(whole).__name__} has no known chain of layers "
        f"(known: {', '.join(CHAINS)}; tested: {TESTED}); write a factory that returns "
        "its stages"
    )


def strip(
    whole: nn.Module,
    span: Span,
    architecture: Architecture,
    *,
    keeps_tokens: bool = False,
) -> None:
    """Replace the modules of other stages, in place, with modules without weights.

    ``keeps_tokens``: the token embeddings stay, because the head shares their weights.
    """
    table = _table_of(whole) if keeps_tokens and not span.is_first else None
    chain = whole.get_submodule(architecture.chain)
    assert isinstance(chain, nn.ModuleList)
    # This stage's layers keep their numbers, because the names of weights contain them.
    for number in range(span.count):
        if not span.begin <= number < span.end:
            chain[number] = Identity()
    if not span.is_first:
        _replace(whole, architecture.embeddings, PassEmbeddings)
        _replace(whole, architecture.positions, NoPositions)
        _replace(whole, architecture.tokens, Identity)
        for name in FACTORS:
            if hasattr(whole, name):
                setattr(whole, name, 1.0)
    if not span.is_last:
        _replace(whole, architecture.after, Identity)
    if table is not None:
        name, module = table
        holder, _, last = name.rpartition(".")
        setattr(whole.get_submodule(holder), last, module)


def _table_of(whole: Any) -> tuple[str, nn.Module] | None:
    """Return the token embeddings of a transformers model, and their name."""
    table = whole.get_input_embeddings()
    pairs = (
        (name, module) for name, module in whole.named_modules() if module is table
    )
    return next(pairs, None)


def _replace(whole: nn.Module, names: Sequence[str], kind: type[nn.Module]) -> None:
    for name in names:
        parent, _, last = name.rpartition(".")
        holder = whole.get_submodule(parent)
        if getattr(holder, last) is not None:
            setattr(holder, last, kind())
