"""Matrix products in int8 with exact sums, for CPUs.

Weights have a byte, and a scale for each output. Each row of activations is scaled to
its largest magnitude and written as two integers of 7 bits, ``high + low / 126``, which
are two rows of one call: 14 bits in all. Sums of integers do not round. So a row has
the same bits in a call of any size, at any place, with any number of threads, and on
any processor: what follows the sums is exactly rounded, number by number. With 7 bits
no kernel saturates, which those of AVX2 would with 8.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.errors import ModelFailedError

LEVELS = 63
"""Largest magnitude of an integer of activations."""

SHIFT = 64
"""Zero point: the operator takes unsigned activations."""

FINER = 126
"""The low integer counts steps of 1 / FINER of the high one's."""

SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of rows of a call; others are filled up. oneDNN makes a kernel for each."""

CHECKED = 3
"""Rows of the product that is compared with exact sums, when a weight is loaded."""


class IntegerLinear(nn.Module):
    """The product with one weight, [outputs, inputs], in int8, and a bias.

    Raises ModelFailedError if this torch computes no exact sums.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        integers, self.scale = _quantized(weight.detach())
        self.bias = None if bias is None else bias.detach().float()
        ones = torch.ones(self.out_features)
        zeros = torch.zeros(self.out_features, dtype=torch.int64)
        try:
            packed = torch.ops.onednn.qlinear_prepack(integers, None)
            self._given: tuple[Any, ...] = (packed, ones, zeros)
            self._check(integers)
        except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
            raise ModelFailedError(
                f"quantization: int8 needs an operator that torch {torch.__version__} "
                f"lacks here, or computes otherwise: {error}; remove quantization"
            ) from error

    @property
    def nbytes(self) -> int:
        """Memory of the weight, in bytes."""
        return self.out_features * (self.in_features + self.scale.element_size())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def forward(self, given: Tensor) -> Tensor:
        """Return the product; ``given`` is [..., inputs], the result has its dtype."""
        rows = given.reshape(-1, self.in_features).float()
        count = len(rows)
        most = rows.abs().amax(-1, keepdim=True).clamp_(min=1e-30)
        scaled = rows * (LEVELS / most)
        high = scaled.round()
        low = scaled.sub_(high).mul_(FINER).round_()
        integers = rows.new_full(
            (_size(2 * count), self.in_features), SHIFT, dtype=torch.uint8
        )
        integers[:count] = high.add_(SHIFT)
        integers[count : 2 * count] = low.add_(SHIFT)
        sums = self._sums(integers)
        out = sums[count : 2 * count].mul_(1 / FINER).add_(sums[:count])
        out.mul_(most * (1 / LEVELS)).mul_(self.scale)
        if self.bias is not None:
            out.add_(self.bias)
        return out.to(given.dtype).view(*given.shape[:-1], self.out_features)

    def _sums(self, integers: Tensor) -> Tensor:
        """Return the sums of activations and weights, [rows, outputs], float32."""
        packed, ones, zeros = self._given
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(integers, 1.0, SHIFT, packed, ones, zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return found

    def _check(self, integers: Tensor) -> None:
        """Raise RuntimeError unless the operator's sums are exact."""
        chance = torch.Generator().manual_seed(0)
        shape = CHECKED, self.in_features
        given = torch.randint(SHIFT - LEVELS, 2 * SHIFT, shape, generator=chance)
        given[0] = SHIFT + LEVELS  # the largest sums
        found = self._sums(given.to(torch.uint8))
        exact = (given - SHIFT).double()
        for begin in range(0, self.out_features, 4096):
            here = slice(begin, begin + 4096)
            wanted = (exact @ integers[here].double().t()).float()
            if not torch.equal(found[:, here], wanted):
                raise RuntimeError("its sums are not exact")


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as integers, int8, and the scale of each row, [outputs]."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for begin in range(0, len(weight), 4096):  # the head of a model is large
        part = weight[begin : begin + 4096].float()
        most = part.abs().amax(1) / 127
        most[most == 0] = 1.0
        scale[begin : begin + 4096] = most
        integers[begin : begin + 4096] = (part / most[:, None]).round().clamp(-127, 127)
    return integers, scale


def _size(count: int) -> int:
    """Return the number of rows of a call that holds ``count`` rows."""
    most = SIZES[-1]
    if count > most:
        return -(-count // most) * most
    return SIZES[bisect_left(SIZES, count)]


def quantize_linears(module: nn.Module) -> None:
    """Replace the ``Linear`` and ``Conv1D`` modules of a module, in place.

    Their weights are freed unless another module shares them, as embeddings do.
    """
    for holder in list(module.modules()):
        for name, found in list(holder.named_children()):
            each: Any = found
            if isinstance(found, nn.Linear):
                setattr(holder, name, IntegerLinear(each.weight, each.bias))
            elif type(found).__name__ == "Conv1D":
                setattr(holder, name, IntegerLinear(each.weight.t(), each.bias))
