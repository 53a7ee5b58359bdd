"""One stage of a decoder: transformers' own layers with our attention.

transformers gets all rows of a step as a batch of one, [1, rows, hidden], with explicit
positions. It calls our attention by its registered name; the attention of the current
step is in ``_step``.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.errors import SpecError
from multiworld.serve.engine.models import folder_facts, transformer_stage
from multiworld.serve.engine.models.architectures import architecture_of
from multiworld.serve.engine.models.attention import Attention, AttentionCall
from multiworld.serve.engine.models.partition import Span

# The name under which our attention is registered in transformers.
ATTENTION = "multiworld"

REMEDY = "use `engine: vllm`, or another model"

# Arguments with which layers ask for kinds of attention that are not supported.
OTHER_ATTENTION = {
    "s_aux": "sinks",
    "sinks": "sinks",
    "position_bias": "a position bias",
    "indices": "chosen tokens",
    "block_indices": "chosen blocks",
}

# Finds rotary embeddings that depend on the longest position in a step.
CHANGING_ROTATION = re.compile("'(rope_type|type)': '(dynamic|longrope)'")

MAX_POSITIONS = re.compile(r"'\w*max_position\w*': (\d+)")

_step = threading.local()


def load(
    folder: Path,
    span: Span,
    dtype: str,
    device: str,
    quantization: str | None = None,
    # How many numbers are booked for the key and value of a token, if that is known.
    kv_numbers: int | None = None,
) -> DecoderStage:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig

    _register()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING if span.is_last else MODEL_MAPPING
    kind = transformer_stage.kind_of(folder, config, kinds, "language model", REMEDY)
    folder_facts.check_kinds(getattr(config, "layer_types", None) or (), folder)
    config._attn_implementation = ATTENTION
    try:
        whole = transformer_stage.load_owned(
            folder, kind, config, span, dtype, quantization
        )
    except KeyError as error:  # an older class looks up ATTENTION in a table of its own
        if error.args != (ATTENTION,):
            raise
        raise _without_interface(folder, 0, span) from error
    stage = DecoderStage(whole, span).to(device).eval()
    _check_attention(stage, span, folder, kv_numbers)
    return stage


def _check_attention(
    stage: DecoderStage, span: Span, folder: Path, kv_numbers: int | None
) -> None:
    """Refuse layers that bypass our attention, or need more KV memory than booked."""
    seen = _Seen()
    device = stage.device
    rows, positions = stage.example(2, 0).to(device), torch.arange(2, device=device)
    _step.window = None
    chain: Any = stage.whole.base_model
    chain = chain.get_submodule(architecture_of(chain, folder).chain)
    calls: list[nn.Module] = []
    hooks = [
        layer.register_forward_pre_hook(lambda one, _: calls.append(one))
        for layer in chain
    ]
    try:
        with torch.inference_mode():
            stage(rows, positions, seen, positions)
    except SpecError:
        raise
    except Exception as error:  # an architecture that no test covers may raise anything
        kind = getattr(stage.whole.config, "model_type", "the model")
        raise SpecError(
            f"{folder}: {kind} cannot be computed in stages ({type(error).__name__}: "
            f"{error}); {REMEDY}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if calls != [*chain]:
        raise SpecError(
            f"{folder}: its {len(chain)} layers ran {len(calls)} times, so they do "
            f"not form one chain; {REMEDY}"
        )
    if len(seen.layers) != span.end - span.begin:
        count = len({*seen.layers})
        if count == span.end - span.begin:
            raise SpecError(
                f"{folder}: its layers call their attention more than once, so text "
                f"cannot be generated in steps; {REMEDY}"
            )
        raise _without_interface(folder, count, span)
    if kv_numbers is not None and seen.kv_numbers > kv_numbers:
        raise SpecError(
            f"{folder}: its layers cache {seen.kv_numbers} numbers per token, but its "
            f"config.json implies {kv_numbers}, so too little KV memory was booked; "
            f"{REMEDY}"
        )
    config: Any = stage.whole.config
    kinds = getattr(config.get_text_config(), "layer_types", None)
    is_windowed = kinds is None or "sliding_attention" in kinds
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    window: int | None = _step.window
    is_bound = window is not None and window < (longest or math.inf)
    if is_bound and is_windowed and not seen.has_window:
        raise SpecError(
            f"{folder}: its layers define their attention window only in a mask, which "
            f"has no effect here, so they would attend to everything; {REMEDY}"
        )


def _without_interface(folder: Path, count: int, span: Span) -> SpecError:
    return SpecError(
        f"{folder}: only {count} of {span.end - span.begin} layers use transformers' "
        f"attention interface, so text cannot be generated in steps; {REMEDY}"
    )


class _Seen(Attention):
    """Attention that records which layers use it."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.kv_numbers = 0  # numbers in a token's key and value, in all layers
        self.has_window = False

    def compute(self, call: AttentionCall) -> Tensor:
        self.layers.append(call.layer)
        self.kv_numbers += sum(t.shape[0] * t.shape[2] for t in (call.key, call.value))
        self.has_window = self.has_window or call.window is not None
        return call.empty().zero_()


def _register() -> None:
    """Register our attention in transformers, without a mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> None:
    """Return no mask, because our attention has its own; record the window."""
    if local_size is not None:
        _step.window = local_size


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for name, what in OTHER_ATTENTION.items():
        if kwargs.get(name) is not None:
            raise SpecError(f"attention with {what} is not supported; {REMEDY}")
    if getattr(module, "is_causal", True) is False:
        raise SpecError(
            "non-causal attention (to later tokens) cannot be computed in steps; "
            f"{REMEDY}"
        )
    if attention_mask is not None:
        raise SpecError(
            f"attention with a layer-specific mask is not supported; {REMEDY}"
        )
    layer: Any = module.layer_idx
    found = DecoderStage.attend(
        layer,
        query[0],
        key[0],
        value[0],
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return found[None], None


class DecoderStage(nn.Module):
    """The layers of a stage as a function of rows, positions and attention."""

    def __init__(self, whole: nn.Module, span: Span) -> None:
        super().__init__()
        self.whole, self._span = whole, span

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def _facts(self) -> dict[str, Any]:
        whole: Any = self.whole
        found: dict[str, Any] = whole.config.get_text_config().to_dict()
        return found

    @property
    def max_positions(self) -> int:
        """Maximum number of positions in the model's config, at least 4,096."""
        found = MAX_POSITIONS.findall(str(self._facts))
        return max(4096, *map(int, found))

    @property
    def is_recordable(self) -> bool:
        """Whether steps can be CUDA graphs: the host makes no decisions in them."""
        facts = self._facts
        has_experts = any("experts" in name and facts[name] for name in facts)
        return not has_experts and not CHANGING_ROTATION.search(str(facts))

    @staticmethod
    def attend(
        layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        """Call the attention of the current step."""
        attention: Attention = _step.attention
        return attention.attend(layer, query, key, value, **options)

    @staticmethod
    @contextlib.contextmanager
    def attending(attention: Attention) -> Iterator[None]:
        """Use ``attention`` for the current step, in the context."""
        _step.attention = attention
        try:
            yield
        finally:
            _step.attention = None

    def example(self, count: int, seed: int) -> Tensor:
        """Return random rows as the previous stage sends them; see ``forward``."""
        whole: Any = self.whole
        config = whole.config.get_text_config()
        chance = torch.Generator().manual_seed(seed)
        if self._span.is_first:
            return torch.randint(config.vocab_size, (count,), generator=chance)
        shape = count, config.hidden_size
        return torch.randn(shape, generator=chance).to(whole.device, whole.dtype)

    def forward(
        self, rows: Tensor, positions: Tensor, attention: Attention, wanted: Tensor
    ) -> Tensor:
        """Compute the layers of this stage for the rows of a step."""
        # ``rows`` are token ids, [rows], int64, in the first stage, and otherwise
        # hidden states, [rows, hidden]. Returns hidden states, [rows, hidden], or in
        # the last stage the logits of the rows ``wanted``, [wanted, vocabulary],
        # float32.
        name = "input_ids" if self._span.is_first else "inputs_embeds"
        given = {name: rows[None], "position_ids": positions[None], "use_cache": False}
        with self.attending(attention):
            if not self._span.is_last:
                hidden: Tensor = self.whole(**given).last_hidden_state
                return hidden[0]
            logits: Tensor = self.whole(**given, logits_to_keep=wanted).logits
            return logits[0].to(torch.float32)
