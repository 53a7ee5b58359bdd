"""Matrix products in int8: exact sums that are bit-identical in any batch."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from multiworld.errors import ModelFailedError
from multiworld.serve.engine.models import integer_linear as integers
from multiworld.serve.engine.models import integer_products
from multiworld.serve.engine.models.integer_linear import (
    Fbgemm,
    IntegerLinear,
    Kernel,
    OneDnn,
    quantize_linears,
)
from multiworld.serve.engine.models.integer_products import (
    CompiledProducts,
    Instructions,
)
from multiworld.serve.engine.models.meter import parameter_bytes
from multiworld.serve.engine.models.packed_linear import pack_linears


@pytest.fixture(params=[1, 2, 3, 4, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


try:
    INSTRUCTIONS = integer_products.best()
except NotImplementedError:
    INSTRUCTIONS = Instructions.NONE

NEEDS_FBGEMM = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines,
    reason="torch has no FBGEMM on this processor",
)


COMPILED = [
    pytest.param(
        instructions,
        marks=pytest.mark.skipif(
            instructions > INSTRUCTIONS,
            reason="not compiled here, or the processor lacks these instructions",
        ),
    )
    for instructions in (Instructions.AVX2, Instructions.VNNI, Instructions.AMX)
]


@pytest.fixture(params=[OneDnn, pytest.param(Fbgemm, marks=NEEDS_FBGEMM), *COMPILED])
def kernel(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> type[Kernel]:
    """Use only this kernel, whatever the processor is."""
    made: type[Kernel] = CompiledProducts
    if isinstance(request.param, Instructions):
        monkeypatch.setattr(integer_products, "best", lambda: request.param)
    else:
        made = request.param
    monkeypatch.setattr(integers, "kernels", lambda: [made])
    monkeypatch.setattr(integers, "checked", {})
    return made


@pytest.mark.parametrize("kernel", COMPILED, indirect=True)
@pytest.mark.parametrize(
    ("widths", "inputs"), [((40,), 64), ((33, 1, 64), 130), ((7, 70), 3), ((5,), 1)]
)
def test_compiled_products_are_those_of_torch(
    widths: tuple[int, ...], inputs: int, kernel: type[Kernel]
) -> None:
    """The sizes leave blocks and tiles of weights and rows partly filled."""
    weight, scale = integers.quantized(waves(sum(widths), inputs))
    theirs, ours = (make(weight, scale, widths) for make in (integers.OneDnn, kernel))
    with torch.inference_mode():
        for rows in (*range(1, 20), 31, 32, 33, 70):
            given = waves(rows, inputs)
            found, wanted = ours.products(given), theirs.products(given)
            assert [each.shape for each in found] == [(rows, n) for n in widths]
            assert all(map(torch.equal, found, wanted))
            assert all(tensor.is_contiguous() for tensor in found)


@pytest.mark.parametrize("kernel", COMPILED, indirect=True)
def test_the_largest_sums_are_exact(kernel: type[Kernel]) -> None:
    """With the largest weights and integers, no instruction may saturate."""
    for sign in (1, -1):
        weight = torch.full((40, 4_096), sign * 127, dtype=torch.int8)
        given = torch.full((20, 4_096), 62.5)
        given[:, 0] = 63.0
        given[1::2] *= -1
        theirs, ours = (
            make(weight, torch.ones(40), [40]) for make in (integers.OneDnn, kernel)
        )
        assert torch.equal(ours.products(given)[0], theirs.products(given)[0])


def waves(rows: int, columns: int) -> torch.Tensor:
    """Return numbers with the same bits on every processor, one column large."""
    at = torch.arange(rows * columns).view(rows, columns)
    found = ((at * 7919) % 2003 - 1001) / 1024
    found[:, columns // 2] *= 40
    return found


def integer_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Module:
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    holder = nn.Sequential(linear)
    quantize_linears(holder)
    return holder[0]


@pytest.mark.parametrize("inputs", [64, 576, 4_864, 14_336])
def test_integers_give_each_row_the_same_bits(
    inputs: int, threads: int, kernel: type[Kernel]
) -> None:
    linear = integer_linear(waves(40, inputs), waves(1, 40)[0])
    given = waves(150, inputs)
    with torch.inference_mode():
        whole = linear(given)
        for begin, end in ((0, 1), (7, 8), (9, 40), (3, 149), (100, 150)):
            assert torch.equal(linear(given[begin:end]), whole[begin:end])
        backwards = linear(given.flip(0)).flip(0)
        assert torch.equal(backwards, whole)


def test_integers_have_the_same_bits_on_every_processor(kernel: type[Kernel]) -> None:
    """The digest was recorded on a Xeon with AMX."""
    linear = integer_linear(waves(300, 576), waves(1, 300)[0])
    with torch.inference_mode():
        found = linear(waves(50, 576))
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    assert digest[:16] == "77296ad2fa818449"


def test_integers_come_close_to_the_product_of_floats() -> None:
    """Activations have 14 bits, so the error comes from the weights."""
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 576, generator=chance)
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scale).round() * scale
    given = torch.randn(30, 576, generator=chance)
    with torch.inference_mode():
        found = integer_linear(weight)(given)
    assert torch.allclose(found, given @ rounded.t(), atol=0.03)
    assert torch.allclose(found, given @ weight.t(), atol=1.0)


def test_integers_of_strange_rows_concern_those_rows_alone(
    kernel: type[Kernel],
) -> None:
    linear = integer_linear(waves(16, 64))
    given = waves(4, 64)
    with torch.inference_mode():
        plain = linear(given)
        given[0] = 0.0
        given[2, 5] = float("nan")
        found = linear(given)
        given[2, 5] = float("-inf")
        assert linear(given)[2].isnan().all()
        assert found[0].abs().max() == 0.0
        assert found[2].isnan().all()
        assert torch.equal(found[[1, 3]], plain[[1, 3]])
        assert linear(given[:0]).shape == (0, 16)
        assert linear(given.bfloat16()[None, :1]).dtype == torch.bfloat16


def test_integers_replace_linears_and_leave_embeddings() -> None:
    """A head that shares the embedding's weights gets integers of its own."""
    embedding, head = nn.Embedding(50, 8), nn.Linear(8, 50)
    head.weight = words = embedding.weight
    module = nn.ModuleDict({"words": embedding, "head": head})
    quantize_linears(module)
    assert module["words"].weight is words
    assert isinstance(module["head"], IntegerLinear)
    assert parameter_bytes(module) == words.numel() * 4 + 50 * (8 + 4)
    pack_linears(module)
    assert isinstance(module["head"], IntegerLinear)


class Attention(nn.Module):
    """Linears with the names that transformers gives those of an attention."""

    __module__ = "transformers.models.llama.modeling_llama"

    def __init__(self, *, is_biased: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 32, bias=is_biased)
        self.k_proj = nn.Linear(64, 16, bias=is_biased)
        self.v_proj = nn.Linear(64, 16, bias=is_biased)
        self.o_proj = nn.Linear(32, 64, bias=False)


def test_what_chooses_experts_stays_float() -> None:
    """Routers are recognised by their own name or that of the module around them."""

    class TopKGating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wg = nn.Linear(8, 4)

    block = nn.ModuleDict({"gate": nn.Linear(8, 4), "gate_proj": nn.Linear(8, 4)})
    model = nn.ModuleDict({"router": TopKGating(), "mlp": block})
    quantize_linears(model)
    kinds = {name: type(found) for name, found in model.named_modules()}
    assert kinds["router.wg"] is kinds["mlp.gate"] is nn.Linear
    assert kinds["mlp.gate_proj"] is IntegerLinear
    gate = model["mlp"]["gate"]  # type: ignore[index]
    quantize_linears(model, {gate: integers.quantized(gate.weight)})
    assert type(model["mlp"]["gate"]) is IntegerLinear, "its folder has it in int8"  # type: ignore[index]


@pytest.mark.parametrize("is_biased", [False, True])
def test_siblings_are_computed_together_with_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch, is_biased: bool, kernel: type[Kernel]
) -> None:
    attention = Attention(is_biased=is_biased)
    alone = [
        integer_linear(linear.weight, linear.bias)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    quantize_linears(attention)
    together = attention.q_proj, attention.k_proj, attention.v_proj
    calls: list[int] = []
    products = kernel.products

    def counted(made: Kernel, given: torch.Tensor) -> list[torch.Tensor]:
        calls.append(len(given))
        return products(made, given)

    monkeypatch.setattr(kernel, "products", counted)
    given, other = waves(9, 64), waves(5, 64)
    with torch.inference_mode():
        wanted = [linear(given) for linear in alone]
        calls.clear()
        for _ in range(2):
            found = [linear(given) for linear in together]
            assert all(map(torch.equal, found, wanted))
            assert all(tensor.is_contiguous() for tensor in found)
        assert len(calls) == 2
        crossed = [together[0](given), together[1](other), together[2](other)]
        wanted[1:] = [linear(other) for linear in alone[1:]]
        assert all(map(torch.equal, crossed, wanted))
        together[0](given)  # and then its step fails
        given.mul_(2)
        for one, linear in zip(together, alone, strict=True):
            assert torch.equal(one(given), linear(given))
        given = given.clone()
        seen = weakref.ref(given)
        for linear in together:
            linear(given)
        del given
        assert seen() is None


def test_integers_are_refused_where_sums_are_not_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for each in (OneDnn, Fbgemm, CompiledProducts):
        monkeypatch.setattr(
            each, "products", lambda _, rows: [torch.zeros(len(rows), 17)]
        )
    with pytest.raises(ModelFailedError, match="remove quantization"):
        integer_linear(waves(17, 67))


def test_another_kernel_computes_what_the_first_one_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later torch may remove an operator."""

    class Removed(OneDnn):
        def __init__(self, *_: object) -> None:
            raise AttributeError("no such operator")

    wanted = integer_linear(waves(17, 68))(waves(3, 68))
    monkeypatch.setattr(integers, "kernels", lambda: [Removed, OneDnn])
    assert torch.equal(integer_linear(waves(17, 68))(waves(3, 68)), wanted)


@NEEDS_FBGEMM
@pytest.mark.parametrize(
    ("capabilities", "first"),
    [({"avx512_vnni": True}, OneDnn), ({"avx512_vnni": False}, Fbgemm), ({}, OneDnn)],
)
def test_kernel_follows_from_the_processor(
    capabilities: dict[str, bool], first: type[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "get_capabilities"
    monkeypatch.setattr(torch.cpu, name, lambda: capabilities, raising=False)
    assert integers.kernels()[:2] == [CompiledProducts, first]
    assert integers.kernels()[-1] is OneDnn
