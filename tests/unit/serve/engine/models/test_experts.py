"""Experts of a mixture as linears, compared with those of transformers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from multiworld.serve.engine.models.experts import Experts, split_experts
from multiworld.serve.engine.models.integer_linear import (
    IntegerLinear,
    quantize_linears,
)
from multiworld.serve.engine.models.packed_linear import pack_linears

HIDDEN, COUNT, CHOSEN = 48, 6, 2
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "moe_intermediate_size": 40,
    "num_experts": COUNT,
    "num_local_experts": COUNT,
    "experts_implementation": "eager",
}


def experts(kind: Any = Qwen3MoeExperts, config: Any = Qwen3MoeConfig) -> Any:
    torch.manual_seed(3)
    made = kind(config(**SIZES))
    for weight in made.parameters():
        weight.data = torch.randn_like(weight) * 0.1
    return nn.ModuleDict({"experts": made}).eval()


def rows(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, their chosen experts and the weights of these."""
    chance = torch.Generator().manual_seed(count)
    scores = torch.rand(count, COUNT, generator=chance)
    weights, chosen = scores.topk(CHOSEN)
    return torch.randn(count, HIDDEN, generator=chance), chosen, weights


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Qwen3MoeExperts, Qwen3MoeConfig), (MixtralExperts, MixtralConfig)],
)
@torch.inference_mode()
def test_outputs_are_those_of_transformers(kind: Any, config: Any) -> None:
    holder = experts(kind, config)
    given = [rows(count) for count in (0, 1, 5, 40)]
    wanted = [holder["experts"](*these) for these in given]
    split_experts(holder)
    assert isinstance(holder["experts"], Experts)
    for packs in (False, True):
        if packs:
            pack_linears(holder)
        for these, each in zip(given, wanted, strict=True):
            torch.testing.assert_close(holder["experts"](*these), each)


@torch.inference_mode()
def test_outputs_in_int8_are_close_and_exact_in_every_batch() -> None:
    holder = experts()
    given = rows(40)
    wanted = holder["experts"](*given)
    split_experts(holder)
    quantize_linears(holder)
    linears = [m for m in holder.modules() if isinstance(m, IntegerLinear)]
    assert len(linears) == 2 * COUNT
    found = holder["experts"](*given)
    assert (found - wanted).norm() / wanted.norm() < 0.02
    for row in range(0, 40, 7):
        alone = holder["experts"](*(part[row : row + 1] for part in given))
        assert torch.equal(alone[0], found[row])


@torch.inference_mode()
def test_number_beyond_the_experts_adds_nothing() -> None:
    """transformers gives this number to rows whose expert is elsewhere."""
    holder = experts()
    hidden, chosen, weights = rows(8)
    chosen[::2, 1] = COUNT
    wanted = holder["experts"](hidden, chosen, weights)
    split_experts(holder)
    torch.testing.assert_close(holder["experts"](hidden, chosen, weights), wanted)


def test_float_weights_are_freed_once_they_are_quantized() -> None:
    holder = experts()
    watch: Any = StorageWeakRef
    storage = watch(holder["experts"].gate_up_proj.untyped_storage())
    split_experts(holder)
    gc.collect()
    assert not storage.expired()
    quantize_linears(holder)
    gc.collect()
    assert storage.expired()


def test_experts_of_another_layout_stay() -> None:
    """GPT-OSS transposes its experts, and adds biases."""
    holder = experts(GptOssExperts, GptOssConfig)
    split_experts(holder)
    assert isinstance(holder["experts"], GptOssExperts)
