"""Packed weights: the products of the module, with its memory freed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from multiworld.serve.engine.models.bfloat16_products import Bfloat16Linear
from multiworld.serve.engine.models.packed_linear import PackedLinear, pack_linears


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_packed_module_computes_the_same(
    rows: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """A processor without fast bfloat16 leaves a module in bfloat16 as it is."""
    module = nn.Sequential(nn.Linear(24, 40, bias=False), nn.GELU(), nn.Linear(40, 7))
    module = module.to(dtype).eval()
    given = torch.randn(2, rows, 24).to(dtype)
    with torch.inference_mode():
        wanted = module(given)
        pack_linears(module)
        found = module(given)
    is_packed = isinstance(module[0].forward, PackedLinear | Bfloat16Linear)
    assert is_packed != ("weights are not packed" in caplog.text)
    assert is_packed or dtype == torch.bfloat16
    assert found.shape == (2, rows, 7)
    assert torch.allclose(found.float(), wanted.float(), rtol=0.02, atol=0.02)


def test_memory_of_weights_is_freed_unless_they_are_shared() -> None:
    """The head of a language model may share the weights of its embedding."""
    module = nn.ModuleDict({"words": nn.Embedding(50, 8), "head": nn.Linear(8, 50)})
    alone = nn.Linear(8, 8)
    module["alone"] = alone
    module["head"].weight = module["words"].weight
    pack_linears(module)
    assert alone.weight.numel() == 0
    assert alone.weight.dtype == torch.float32
    assert module["words"].weight.shape == (50, 8)
    assert module["words"](torch.tensor([3])).shape == (1, 8)


def test_dtypes_without_fast_products_stay_as_they_are() -> None:
    module = nn.Sequential(nn.Linear(4, 4).double())
    pack_linears(module)
    assert not isinstance(module[0].forward, PackedLinear)


def test_torch_that_cannot_pack_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(PackedLinear, "__call__", fail)
    module = nn.Sequential(nn.Linear(4, 4))
    pack_linears(module)
    assert module(torch.ones(1, 4)).shape == (1, 4)
    assert "weights are not packed: no such thing" in caplog.text
