"""One stage of a decoder, by transformers' own layers and our attention.

The rows of all sequences of a step are one row of a batch, [1, tokens, hidden], with
explicit positions. transformers calls the attention by its name, and it finds the
step's keys and values in this module.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.errors import SpecError
from multiworld.serve.generation.replica.kv_cache import Attention
from multiworld.serve.models import transformer_stage
from multiworld.serve.models.span import Span

ATTENTION = "multiworld"
"""Name of our attention in transformers."""

_step = threading.local()


def load(folder: Path, span: Span, dtype: str, device: str) -> DecoderStage:
    """Build and load the part of a decoder that has the layers of a span.

    Args:
        folder: Hugging Face folder of the model.
        span: Layers of the stage.
        dtype: Name of the torch dtype to compute in.
        device: Torch device of the stage.

    Raises:
        SpecError: transformers has no such decoder with a language-model head, or the
            folder lacks weights.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig

    _register()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING if span.is_last else MODEL_MAPPING
    try:
        kind = mapping[type(config)]
    except KeyError as error:
        raise SpecError(
            f"{folder}: transformers has no language model for {config.model_type}; "
            "write a factory that returns its stages"
        ) from error
    if config.is_encoder_decoder:
        raise SpecError(f"{folder}: {config.model_type} is no decoder with one chain")
    config._attn_implementation = ATTENTION
    whole = transformer_stage.load_owned(folder, kind, config, span, dtype)
    return DecoderStage(whole, span).to(device).eval()


def _register() -> None:
    """Tell transformers our attention, and that it needs no mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Return None: who sees whom follows from the step."""


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
    """Attend for one layer; the signature is that of transformers' attention."""
    if kwargs.get("s_aux") is not None:
        raise SpecError("attention with sinks is not supported")
    attention: Attention = _step.attention
    layer: Any = module.layer_idx
    found = attention.attend(
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
    """The layers of a stage as a function of rows, positions and attention.

    Args:
        whole: The model, reduced to the layers of this stage.
        span: Layers of this stage.
    """

    def __init__(self, whole: nn.Module, span: Span) -> None:
        super().__init__()
        self.whole, self._span = whole, span

    def example(self, count: int, seed: int) -> Tensor:
        """Return random rows as the stage before sends them.

        Args:
            count: Number of rows.
            seed: Seed of the random numbers.

        Returns:
            Token ids, [count], int64; after the first stage hidden states,
            [count, hidden].
        """
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
        """Compute the layers of this stage for the rows of a step.

        Args:
            rows: In the first stage token ids, [rows], int64; in others hidden states,
                [rows, hidden].
            positions: Position of each row in its sequence, [rows], int64.
            attention: Attention of this step.
            wanted: Rows of which the last stage returns logits, [wanted], int64.

        Returns:
            Hidden states, [rows, hidden]; in the last stage logits,
            [wanted, vocabulary], float32.
        """
        name = "input_ids" if self._span.is_first else "inputs_embeds"
        given = {name: rows[None], "position_ids": positions[None], "use_cache": False}
        _step.attention = attention
        try:
            if not self._span.is_last:
                hidden: Tensor = self.whole(**given).last_hidden_state
                return hidden[0]
            logits: Tensor = self.whole(**given, logits_to_keep=wanted).logits
            return logits[0].to(torch.float32)
        finally:
            _step.attention = None
