"""Norms by one call: only where no bit changes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from multiworld.serve.models.fused_norms import fuse_norms


def drawn(norm: nn.Module) -> nn.Module:
    """Give a norm weights that are not all one."""
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64))  # type: ignore[operator]
    return norm


@pytest.mark.parametrize("rows", [1, 4, 200])
def test_bits_do_not_change(rows: int) -> None:
    """Of a row among others, or alone."""
    norm = drawn(LlamaRMSNorm(64, 1e-3))
    given = torch.randn(1, rows, 64) * torch.logspace(-3, 3, rows)[:, None]
    with torch.inference_mode():
        wanted = norm(given)
        fuse_norms(nn.Sequential(norm))
        assert isinstance(norm.forward, functools.partial)
        assert torch.equal(norm(given), wanted)


@pytest.mark.parametrize(
    "norm",
    [Gemma3RMSNorm(64), LlamaRMSNorm(64).bfloat16(), nn.LayerNorm(64), nn.RMSNorm(64)],
    ids=["gemma", "bfloat16", "layer norm", "torch's own"],
)
def test_others_stay_as_they_are(norm: nn.Module) -> None:
    """Those that compute something else, or in another dtype."""
    drawn(norm)
    fuse_norms(norm)
    assert not isinstance(norm.forward, functools.partial)
