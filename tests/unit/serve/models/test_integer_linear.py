"""Products in int8: exact sums, and the same bits however rows are computed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from multiworld.errors import ModelFailedError
from multiworld.serve.models.integer_linear import IntegerLinear, quantize_linears
from multiworld.serve.models.meter import parameter_bytes
from multiworld.serve.models.packed_linear import pack_linears


@pytest.fixture(params=[1, 2, 3, 4, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def waves(rows: int, columns: int) -> torch.Tensor:
    """Return numbers with the same bits on every processor, one column large."""
    at = torch.arange(rows * columns).view(rows, columns)
    found = ((at * 7919) % 2003 - 1001) / 1024
    found[:, columns // 2] *= 40
    return found


@pytest.mark.parametrize("inputs", [64, 576, 4_864, 14_336])
def test_integers_give_each_row_the_same_bits(inputs: int, threads: int) -> None:
    """In calls of any size, at any place, with any number of threads."""
    linear = IntegerLinear(waves(40, inputs), waves(1, 40)[0])
    given = waves(150, inputs)
    with torch.inference_mode():
        whole = linear(given)
        for begin, end in ((0, 1), (7, 8), (9, 40), (3, 149), (100, 150)):
            assert torch.equal(linear(given[begin:end]), whole[begin:end])
        backwards = linear(given.flip(0)).flip(0)
        assert torch.equal(backwards, whole)


def test_integers_have_the_same_bits_on_every_processor() -> None:
    """As recorded on a Xeon with AMX; this also runs as a smaller processor."""
    linear = IntegerLinear(waves(300, 576), waves(1, 300)[0])
    with torch.inference_mode():
        found = linear(waves(50, 576))
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    assert digest[:16] == "70a7f038002b005f"


def test_integers_come_close_to_the_product_of_floats() -> None:
    """Activations have 14 bits, so that what is lost is that of the weights."""
    chance = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 576, generator=chance)
    scale = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scale).round() * scale
    given = torch.randn(30, 576, generator=chance)
    with torch.inference_mode():
        found = IntegerLinear(weight, None)(given)
    assert torch.allclose(found, given @ rounded.t(), atol=0.03)
    assert torch.allclose(found, given @ weight.t(), atol=1.0)


def test_integers_of_strange_rows_concern_those_rows_alone() -> None:
    """Rows of zeros, and numbers that are not finite; no rows at all."""
    linear = IntegerLinear(waves(16, 64), None)
    given = waves(4, 64)
    with torch.inference_mode():
        plain = linear(given)
        given[0] = 0.0
        given[2, 5] = float("nan")
        found = linear(given)
        assert found[0].abs().max() == 0.0
        assert found[2].isnan().all()
        assert torch.equal(found[[1, 3]], plain[[1, 3]])
        assert linear(given[:0]).shape == (0, 16)
        assert linear(given.bfloat16()[None, :1]).dtype == torch.bfloat16


def test_integers_replace_linears_and_leave_embeddings() -> None:
    """A head that shares its weights with the embedding has bytes of its own."""
    embedding, head = nn.Embedding(50, 8), nn.Linear(8, 50)
    head.weight = words = embedding.weight
    module = nn.ModuleDict({"words": embedding, "head": head})
    quantize_linears(module)
    assert module["words"].weight is words
    assert isinstance(module["head"], IntegerLinear)
    assert parameter_bytes(module) == words.numel() * 4 + 50 * (8 + 4)
    pack_linears(module)
    assert isinstance(module["head"], IntegerLinear)


def test_integers_are_refused_where_sums_are_not_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error says what to do."""
    monkeypatch.setattr(
        IntegerLinear, "_sums", lambda self, given: torch.zeros(len(given), 16)
    )
    with pytest.raises(ModelFailedError, match="remove quantization"):
        IntegerLinear(waves(16, 64), None)
