"""One stage of a transformers model, loaded by transformers' own loader.

A subclass of the model's class replaces the modules of other stages (see
``architectures``) with modules without weights. ``from_pretrained`` builds the rest on
``meta``, and reads only the weights of the rest. So transformers' handling of renamed
and fused weights, and of buffers that are in no file, still applies.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from multiworld.errors import SpecError
from multiworld.serve.engine.models import cut_check
from multiworld.serve.engine.models.architectures import (
    COMPARED,
    architecture_of,
    strip,
)
from multiworld.serve.engine.models.experts import split_experts
from multiworld.serve.engine.models.integer_linear import is_linear, quantize_linears
from multiworld.serve.engine.models.packed_linear import unmap
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.engine.models.pooling import Pooling
from multiworld.serve.engine.models.stored_integers import Stored, read_stored
from multiworld.serve.engine.models.weights import LAYER, names_in
from multiworld.serve.spec.stage import Tensors

os.environ.setdefault("HF_HUB_OFFLINE", "1")

FACTORY = "write a factory that returns its stages"


def load(
    folder: Path,
    span: Span,
    dtype: str,
    # How a sentence encoder pools its tokens; None: the model is no sentence encoder.
    pooling: Pooling | None,
    device: str,
    quantization: str | None = None,
) -> LayerPart:
    from transformers import MODEL_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = kind_of(folder, config, MODEL_MAPPING, "base model", FACTORY)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    whole = load_owned(folder, kind, config, span, dtype, quantization)
    unmap(whole)
    return LayerPart(whole, span, pooling).to(device).eval()


def kind_of(folder: Path, config: Any, kinds: Any, what: str, remedy: str) -> Any:
    """Return transformers' class for a config; refuse encoder-decoder models."""
    try:
        kind = kinds[type(config)]
    except KeyError as error:
        raise SpecError(
            f"{folder}: transformers has no {what} for {config.model_type}; {FACTORY}"
        ) from error
    if config.is_encoder_decoder:
        raise SpecError(
            f"{folder}: {config.model_type} has an encoder and a decoder, not one "
            f"chain of layers; {remedy}"
        )
    return kind


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

    # The progress bar would show only a part of the model.
    disable: Any = logging.disable_progress_bar
    disable()
    is_cut = span.end - span.begin < span.count
    if is_cut and config.model_type not in COMPARED:
        cut_check.check(kind, config, folder)
    owned = _owned_class(kind, span, folder)
    wanted = getattr(torch, dtype)
    is_int8 = quantization == "int8"
    if is_int8 and hasattr(config, "quantization_config"):
        # Without this, transformers would need compressed-tensors.
        del config.quantization_config
    whole, info = owned.from_pretrained(
        folder,
        config=config,
        local_files_only=True,
        # With int8, load the weights in the folder's dtype: they then need no more
        # memory than the files do.
        dtype=(config.dtype or wanted) if is_int8 else wanted,
        output_loading_info=True,
    )
    stored = _stored(folder, whole, span) if is_int8 else {}
    by_module = {whole.get_submodule(name): stored[name] for name in stored}
    # A missing pooler is no error: its output is then not used.
    known = ("pooler.", *(f"{name}.weight" for name in stored))
    missing = [name for name in info["missing_keys"] if not name.startswith(known)]
    if missing:
        raise SpecError(
            f"{folder} lacks the weights of {sorted(missing)[:3]} …; save the model "
            "again"
        )
    base = whole.base_model
    _drop_other_layers(base, span, architecture_of(base, folder).chain)
    if is_int8:
        split_experts(whole)
        quantize_linears(whole, by_module)
        # Buffers, such as rotary frequencies, stay as they are.
        for parameter in whole.parameters():
            parameter.data = parameter.data.to(wanted)
    return whole


def _stored(folder: Path, whole: Any, span: Span) -> dict[str, Stored]:
    """Return the weights that a folder has in int8, by module; refuse unknown ones."""
    # Names in the folder may have a prefix that those in a model without a head lack.
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
                f"{folder}: {name} does not belong to a linear layer that can be "
                "loaded in int8 (experts of a mixture cannot); use the model with "
                "float weights"
            )
    found = read_stored(folder, linears)
    return {
        name: found.get(name) or found[prefix + name]
        for name in linears[::2]
        if name in found or prefix + name in found
    }


def _owned_class(kind: Any, span: Span, folder: Path) -> Any:
    class Owned(kind):  # type: ignore[misc]
        # Ignore the weights of other stages in the files. This is a list, because
        # transformers 5.0 adds another list to it.
        _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r".*"]

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            base = self.base_model
            # A head that shares its weights with the embeddings needs them, too.
            is_shared = base is not self and config.tie_word_embeddings
            strip(base, span, architecture_of(base, folder), keeps_tokens=is_shared)

    # transformers finds its conversions of weights by these names.
    Owned.__name__ = Owned.__qualname__ = kind.__name__
    Owned.__module__ = kind.__module__
    return Owned


def _drop_other_layers(whole: nn.Module, span: Span, name: str) -> None:
    """Remove the layers of other stages from the chain and from the config."""
    chain = whole.get_submodule(name)
    assert isinstance(chain, nn.ModuleList)
    # Drop the layers only now that the weights are loaded: weights are found by the
    # numbers of layers in their names.
    for number in reversed(range(span.count)):
        if not span.begin <= number < span.end:
            del chain[number]
    config: Any = whole.config
    # Do not change the config of a whole model, because some models count layers
    # differently.
    if span.end - span.begin < span.count:
        config.num_hidden_layers = span.end - span.begin
        # Cut lists with one item for each layer, such as ``layer_types``: ``forward``
        # counts only the layers of this stage.
        for key, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == span.count:
                setattr(config, key, value[span.begin : span.end])


class LayerPart(nn.Module):
    """A part of a model as a stage: takes and returns a dict of tensors."""

    def __init__(self, whole: nn.Module, span: Span, pooling: Pooling | None) -> None:
        super().__init__()
        self.whole: Any = whole
        self._span, self._pooling = span, pooling

    def forward(self, tensors: Tensors) -> Tensors:
        """Compute the layers from ``input_ids`` or (later stages) ``hidden``."""
        mask = tensors["attention_mask"]
        if self._span.is_first:
            given = {"input_ids": tensors["input_ids"]}
        else:
            given = {"inputs_embeds": tensors["hidden"]}
        # shape: [rows, length, hidden]
        hidden = self.whole(**given, attention_mask=mask).last_hidden_state
        if not self._span.is_last:
            return {"hidden": hidden, "attention_mask": mask}
        if self._pooling is None:
            return {"last_hidden_state": hidden}
        return {"embedding": self._pooling.apply(hidden, mask)}
