"""A transformer in a Hugging Face folder on disk, cut by layers.

Each stage builds the whole model on ``meta``, keeps what it owns (the embeddings, its
layers, what comes after the last layer) and loads the weights of that and of nothing
else. Works for models with one chain of layers: encoders (BERT and its relatives), and
decoders run without a cache. Nothing is fetched: the folder has it all.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.errors import InvalidRequestError, SpecError
from multiworld.serve.models.layers import chain_partition
from multiworld.serve.stage import Model, Stage, StageContext, Tensors, TensorSpec

EXAMPLE_TOKENS = 24
"""About as long as a sentence: what is measured with it shall be typical."""

CHAINS = ("encoder.layer", "layers", "h", "transformer.layer", "decoder.layers")
"""Where architectures keep their layers."""

EMBEDDINGS = ("embeddings", "embed_tokens", "wte")
AFTER = ("norm", "ln_f", "final_layer_norm", "pooler")
"""What stands before and after the layers, where an architecture has it."""


def model(
    path: str,
    stages: int = 1,
    max_length: int | None = None,
    cut: Sequence[int] | None = None,
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

    Raises:
        SpecError: There is no such model, or too few layers.
    """
    folder = Path(path).expanduser()
    config = _json(folder / "config.json")
    layers = _layer_count(config, folder)
    cuts = _cuts(layers, stages, cut, folder)
    pooling = _pooling(folder)
    hidden = int(config["hidden_size"])
    output = (
        TensorSpec("embedding", "FP32", (-1, hidden))
        if pooling
        else TensorSpec("last_hidden_state", "FP32", (-1, -1, hidden))
    )
    made = []
    for number, (begin, end) in enumerate(cuts):
        load = functools.partial(
            load_stage,
            folder,
            begin,
            end,
            is_first=number == 0,
            is_last=number == stages - 1,
        )
        made.append(
            Stage(
                load=load,
                name=f"layers {begin}-{end - 1}",
                ragged={
                    "input_ids": config.get("pad_token_id") or 0,
                    "attention_mask": 0,
                    "hidden": 0.0,
                    "last_hidden_state": 0.0,
                },
            )
        )
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
            int(config.get("max_position_embeddings", 2**31)),
        ),
        text=functools.partial(Tokenizer, folder, tokens) if pooling else None,
        preload=_modules(str(config.get("model_type", ""))),
        parts=functools.partial(model, path, layers, max_length),
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


def _modules(model_type: str) -> list[str]:
    found = [
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


def _layer_count(config: dict[str, Any], folder: Path) -> int:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if name in config:
            return int(config[name])
    raise SpecError(f"{folder}/config.json names no number of layers")


def _pooling(folder: Path) -> str | None:
    """Return how a sentence encoder's rows become one: "mean" or "cls"."""
    if not (folder / "modules.json").exists():
        return None
    path = folder / "1_Pooling" / "config.json"
    if not path.exists():
        return None
    said = _json(path)
    if said.get("pooling_mode_mean_tokens"):
        return "mean"
    if said.get("pooling_mode_cls_token"):
        return "cls"
    raise SpecError(f"{path}: only mean and cls pooling are known")


def _max_length(folder: Path, config: dict[str, Any]) -> int:
    path = folder / "sentence_bert_config.json"
    said = _json(path).get("max_seq_length") if path.exists() else None
    return int(said or config.get("max_position_embeddings") or 512)


CHARACTERS = 64
"""So many characters a token are looked at: the tokenizer reads all it is given, and
throws away what is over the model's length. The longest English words are 45."""


class Tokenizer:
    """Turns text into ``input_ids`` and ``attention_mask`` of one row."""

    def __init__(self, folder: Path, max_length: int) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(folder / "tokenizer.json"))
        self._fast.no_padding()
        self._fast.enable_truncation(max_length)
        self._longest = max_length * CHARACTERS

    def encode(self, text: str) -> Tensors:
        """Return the inputs of one text."""
        ids = self._fast.encode(text[: self._longest]).ids
        return {
            "input_ids": torch.tensor([ids], dtype=torch.int64),
            "attention_mask": torch.ones((1, len(ids)), dtype=torch.int64),
        }


# Loading a stage.


def load_stage(
    folder: Path,
    begin: int,
    end: int,
    context: StageContext,
    *,
    is_first: bool,
    is_last: bool,
) -> Callable[[Tensors], Tensors]:
    """Build the part of a model that has the layers from ``begin`` to before ``end``.

    Raises:
        SpecError: The architecture has no chain of layers that is known here, or the
            folder lacks weights.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        make: Any = AutoModel
        whole: nn.Module = make.from_config(config).eval()
    chain_name, chain = _chain(whole, folder)
    owned = {f"{chain_name}.{number}." for number in range(begin, end)}
    if is_first:
        owned |= {f"{name}." for name in EMBEDDINGS}
    if is_last:
        owned |= {f"{name}." for name in AFTER}
    _load(whole, folder, tuple(owned), context.device)
    for number in reversed(range(len(chain))):
        if not begin <= number < end:
            del chain[number]
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = end - begin
    if not is_first:
        _replace(whole, EMBEDDINGS, PassEmbeddings)
    if not is_last or _pooling(folder):
        _drop_after(whole, keep_norm=is_last)
    _materialise(whole, context.device)
    part = Part(whole, is_first, is_last, _pooling(folder))
    return part.to(context.device).eval()


def _chain(whole: nn.Module, folder: Path) -> tuple[str, nn.ModuleList]:
    for name in CHAINS:
        try:
            found = whole.get_submodule(name)
        except AttributeError:
            continue
        if isinstance(found, nn.ModuleList):
            return name, found
    raise SpecError(
        f"{folder}: {type(whole).__name__} has no chain of layers that is known here "
        f"({', '.join(CHAINS)}); write a factory that returns its stages"
    )


def _load(whole: nn.Module, folder: Path, owned: tuple[str, ...], device: str) -> None:
    """Put the weights that are owned in place; nothing else is read."""
    from safetensors import safe_open

    wanted = {name for name, _ in whole.named_parameters() if name.startswith(owned)}
    wanted |= {n for n, _ in whole.named_buffers() if n.startswith(owned)}
    state: dict[str, Tensor] = {}
    for file in _files(folder):
        with safe_open(file, framework="pt", device=device) as weights:
            for key in weights.keys():  # noqa: SIM118 - not a dict
                name = key.removeprefix(f"{whole.base_model_prefix}.")
                if name in wanted:
                    state[name] = weights.get_tensor(key)
    missing = {n for n, _ in whole.named_parameters() if n in wanted} - state.keys()
    # A folder without a pooler's weights is one whose pooler nobody uses.
    missing = {name for name in missing if not name.startswith("pooler.")}
    if missing:
        raise SpecError(f"{folder} lacks the weights of {sorted(missing)[:3]} …")
    whole.load_state_dict(state, strict=False, assign=True)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_json(index)["weight_map"].values()))
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if not single.exists():
        raise SpecError(f"{folder} has no model.safetensors; save the model with it")
    return [single]


class PassEmbeddings(nn.Module):
    """Stands where the embeddings were: what comes in has been embedded."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Tensor:
        """Return what came in."""
        return inputs_embeds


class PassOn(nn.Module):
    """Stands where something was that another stage does."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what came in."""
        return hidden


def _replace(
    whole: nn.Module, names: tuple[str, ...], kind: Callable[[], nn.Module]
) -> None:
    for name in names:
        if hasattr(whole, name):
            setattr(whole, name, kind())


def _drop_after(whole: nn.Module, *, keep_norm: bool) -> None:
    if hasattr(whole, "pooler"):
        whole.pooler = None  # type: ignore[assignment]
    if not keep_norm:
        _replace(whole, AFTER[:-1], PassOn)


def _materialise(whole: nn.Module, device: str) -> None:
    """Compute the buffers that no file has (positions, rotary frequencies)."""
    for module in whole.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module.register_buffer(
                    name, _buffer(module, name, buffer, device), persistent=False
                )


def _buffer(module: nn.Module, name: str, buffer: Tensor, device: str) -> Tensor:
    if name == "position_ids":
        return torch.arange(buffer.shape[-1], device=device).expand(buffer.shape)
    if name == "token_type_ids":
        return torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    config = getattr(module, "config", None)
    if config is not None and name in ("inv_freq", "original_inv_freq"):
        with torch.device(device):
            found: Tensor = getattr(type(module)(config), name)
        return found
    raise SpecError(f"the buffer {name} of {type(module).__name__} is in no file")


class Part(nn.Module):
    """A part of a model as a stage: a dict of tensors in, a dict of tensors out."""

    def __init__(
        self, whole: nn.Module, is_first: bool, is_last: bool, pooling: str | None
    ) -> None:
        super().__init__()
        self.whole, self._pooling = whole, pooling
        self._is_first, self._is_last = is_first, is_last

    def forward(self, tensors: Tensors) -> Tensors:
        """Compute the layers."""
        mask = tensors["attention_mask"]
        if self._is_first:
            given = {"input_ids": tensors["input_ids"]}
        else:
            given = {"inputs_embeds": tensors["hidden"]}
        hidden = self.whole(**given, attention_mask=mask).last_hidden_state
        if not self._is_last:
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
