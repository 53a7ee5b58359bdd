"""Products in bfloat16: near the exact ones, and the same bits in calls of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from multiworld.serve.engine.compute.batch_invariant_layers import (
    make_linears_invariant,
)
from multiworld.serve.engine.models.bfloat16_products import (
    Bfloat16Linear,
    Instructions,
    best,
    instructions,
)
from multiworld.serve.engine.models.packed_linear import pack_linears


def kinds() -> list[Instructions]:
    """Return the kinds of instructions that can be used here, the best one last."""
    try:
        return [kind for kind in Instructions if Instructions.NONE < kind <= best()]
    except NotImplementedError:
        return []


KINDS = pytest.mark.parametrize("kind", list(Instructions)[1:])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=chance).bfloat16()


def linear(kind: Instructions, weight: Tensor, bias: Tensor | None) -> Bfloat16Linear:
    if kind not in kinds():
        pytest.skip("not compiled here, or the processor lacks these instructions")
    return Bfloat16Linear(weight, bias, kind)


@KINDS
@pytest.mark.parametrize("outputs", [1, 16, 31, 32, 33, 200])
@pytest.mark.parametrize("inputs", [1, 2, 31, 64, 577])
@pytest.mark.parametrize("rows", [0, 1, 3, 12, 45])
def test_products_are_near_the_exact_ones(
    kind: Instructions, outputs: int, inputs: int, rows: int
) -> None:
    weight, bias = numbers(outputs, inputs), numbers(outputs, seed=1)
    given = numbers(rows, inputs, seed=2)
    found = linear(kind, weight, bias)(given)
    exact = given.double() @ weight.double().t() + bias.double()
    size = given.double().abs() @ weight.double().abs().t() + bias.double().abs()
    # Half a step of bfloat16's 8 bits, and float32's roundings of each sum.
    allowed = exact.abs() * 2**-8 + size * inputs * 2**-23 + 1e-30
    assert found.dtype is torch.bfloat16
    assert bool(((found.double() - exact).abs() <= allowed).all())


@KINDS
def test_row_has_the_same_bits_in_calls_of_any_size(kind: Instructions) -> None:
    product = linear(kind, numbers(200, 576), None)
    if not product.is_invariant:
        pytest.skip("tiles round otherwise; their sizes are tried")
    given = numbers(130, 576, seed=1)
    whole = product(given)
    for count in (1, 2, 3, 4, 5, 8, 11, 12, 13, 24, 31, 64, 128):
        for begin in (0, 1, 7):
            here = slice(begin, begin + count)
            assert torch.equal(product(given[here]), whole[here]), count


@KINDS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_bits(kind: Instructions, threads: int) -> None:
    product = linear(kind, numbers(200, 64), None)
    given = numbers(5, 64, seed=1)
    before = torch.get_num_threads()
    wanted = product(given)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(product(given), wanted)
    finally:
        torch.set_num_threads(before)


@KINDS
def test_numbers_that_are_none_stay_in_their_row(kind: Instructions) -> None:
    product = linear(kind, numbers(40, 64), None)
    given = numbers(3, 64, seed=1)
    wanted = product(given)
    given[1, 5] = float("nan")
    given[2, 5] = float("inf")
    found = product(given)
    assert torch.equal(found[0], wanted[0])
    assert bool(found[1].isnan().all())
    assert not bool(found[2].isfinite().any())


@pytest.mark.skipif(not kinds(), reason="not compiled here")
def test_rows_of_any_shape_and_stride() -> None:
    product = Bfloat16Linear(numbers(40, 64), None)
    given = numbers(2, 64, 3, seed=1).transpose(1, 2)
    found = product(given)
    assert found.shape == (2, 3, 40)
    assert torch.equal(found[1], product(given[1].contiguous()))


@pytest.mark.skipif(not kinds(), reason="not compiled here")
def test_module_is_packed_and_is_invariant_as_it_is() -> None:
    module = nn.Sequential(nn.Linear(64, 40, bias=False)).bfloat16()
    pack_linears(module)
    packed = module[0].forward
    assert isinstance(packed, Bfloat16Linear)
    make_linears_invariant(module)
    assert (module[0].forward is packed) == packed.is_invariant
    assert instructions().endswith(best().name)
