"""Check that a transformers model can be cut between its layers.

In an architecture that no test covers, stages may apply a module twice or leave it out:
a norm with an unknown name after the last layer, or a factor of the embeddings that the
model also applies to ``inputs_embeds``. So a trial removes the layers from a model, and
compares the outputs of the rest in one stage and in three, with random weights and a
few tokens.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.errors import SpecError
from multiworld.serve.engine.models.architectures import (
    Architecture,
    Identity,
    architecture_of,
    strip,
)
from multiworld.serve.engine.models.partition import Span

# Architectures that cannot run without layers. Tests compare their stages instead.
NEED_LAYERS = ("deberta-v2",)

REMEDY = (
    "serve it in one stage, use an engine, or write a factory that returns its stages"
)

WORDS, ROWS = 64, 5  # tokens in the vocabulary, and in the sequence, of a trial
# Maximum number of weights outside the layers of a model in a trial.
MAX_NUMBERS = 10**8


def check(kind: Any, config: Any, folder: Path) -> None:
    """Raise SpecError if a model's stages would not compute the same as the whole."""
    try:
        is_same = _is_same(kind, copy.deepcopy(config), folder)
    except SpecError:
        raise
    except Exception as error:  # perhaps it cannot run without layers
        raise SpecError(
            f"{folder}: a trial could not show that {config.model_type} can be cut "
            f"into stages ({type(error).__name__}: {error}); {REMEDY}"
        ) from error
    if not is_same:
        raise SpecError(
            f"{folder}: the stages of {config.model_type} would not compute the same "
            f"as the whole model; {REMEDY}"
        )


@torch.inference_mode()
def _is_same(kind: Any, config: Any, folder: Path) -> bool:
    config.vocab_size, config.pad_token_id = WORDS, 0
    if hasattr(config, "vocab_size_per_layer_input"):
        config.vocab_size_per_layer_input = WORDS
    with torch.device("meta"):
        base = kind(config).base_model
    architecture = architecture_of(base, folder)
    count = len(base.get_submodule(architecture.chain))
    chain = nn.ModuleList(Identity() for _ in range(count))
    base.set_submodule(architecture.chain, chain)
    holder = base.get_submodule(architecture.chain.rpartition(".")[0])
    if getattr(holder, "conv", None) is not None:
        return False  # DeBERTa's convolution runs between the first two layers
    if config.model_type in NEED_LAYERS:
        return True
    size = sum(tensor.numel() for tensor in _tensors(base))
    if size > MAX_NUMBERS:
        raise MemoryError(
            f"the model has {size:,} weights outside its layers; a trial takes at most "
            f"{MAX_NUMBERS:,}"
        )
    base = base.to_empty(device="cpu").to(torch.float32).eval()
    _fill(base)
    spans = Span(0, count, count), Span(0, 1, count), Span(1, 1, count)
    whole, first, middle = (_part(base, span, architecture) for span in spans)
    last = _part(base, Span(1, count, count), architecture)
    ids = torch.arange(1, ROWS + 1)[None]
    hidden = _run(first, input_ids=ids)
    passed = _run(middle, inputs_embeds=hidden)
    together = _run(last, inputs_embeds=passed)
    calls = _counted(whole, architecture.after)
    in_one = _run(whole, input_ids=ids)
    # Earlier stages run without the modules in ``after``, because ``strip`` removes
    # them there. So the whole model must run each of these modules at most once.
    is_once = all(count <= 1 for count in Counter(calls).values())
    return is_once and torch.equal(hidden, passed) and torch.equal(together, in_one)


def _counted(whole: nn.Module, names: Sequence[str]) -> list[str]:
    """Return a list to which every call of a named module adds the module's name."""
    calls: list[str] = []
    for name in names:
        module: nn.Module | None = whole.get_submodule(name)
        if module is not None:
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    return calls


def _fill(base: nn.Module) -> None:
    chance = torch.Generator().manual_seed(0)
    for name, tensor in (*base.named_parameters(), *base.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5, generator=chance)
        elif name.endswith("position_ids"):
            values = torch.arange(tensor.numel()).view(tensor.shape)
            tensor.data.copy_(values.clamp(max=ROWS + 2))
        else:  # for instance, token types
            tensor.data.zero_()


def _tensors(base: nn.Module) -> list[Tensor]:
    return [*base.parameters(), *base.buffers()]


def _part(base: nn.Module, span: Span, architecture: Architecture) -> nn.Module:
    # The parts share their tensors, which are never written to.
    part = copy.deepcopy(base, {id(tensor): tensor for tensor in _tensors(base)})
    strip(part, span, architecture)
    part.set_submodule(architecture.chain, nn.ModuleList())
    config: Any = part.config
    config.num_hidden_layers = 0
    return part


def _run(part: nn.Module, **given: Tensor) -> Tensor:
    mask = torch.ones(1, ROWS, dtype=torch.int64)
    hidden: Tensor = part(**given, attention_mask=mask).last_hidden_state
    return hidden
