"""Matrix products in int8 with exact sums, for CPUs.

A weight is one byte, and each output has a scale. Each row of activations is scaled by
its largest magnitude. Each number is written as two integers of 7 bits, ``high + low /
128``; the high and the low integers are two rows of one call. Sums of integers do not
round, and each of the operations that follow is correctly rounded. So a row has the
same bits in a call of any size, at any position, with any number of threads, and on any
processor. With integers of 8 bits, kernels for AVX2 could saturate. With 7 bits they
cannot: the sum of two products is at most 2 x 128 x 127, which fits into 16 bits.

Code that is compiled on this machine computes the products. If it is not available,
torch computes them with oneDNN or FBGEMM. FBGEMM is used if the processor has no
instructions for products of bytes (VNNI): there, for up to 16 rows, its kernels take a
quarter of the time that oneDNN's take. The compiled code, oneDNN and FBGEMM all give
the same bits.
"""

from __future__ import annotations

import re
import warnings
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from multiworld.errors import ModelFailedError
from multiworld.serve.engine.models.integer_products import CompiledProducts
from multiworld.serve.engine.models.stored_integers import Stored

LEVELS = 63  # largest magnitude of a high integer; low integers refine these
SHIFT = 64  # zero point of activations, because the operator takes unsigned integers
# A float32 of this size has no fraction bits, so adding this rounds to an integer.
ROUNDING = 1.5 * 2**23
# Number of low steps in one high step; a low integer is at most 64 in magnitude.
FINER = 128

# The numbers of rows that oneDNN gets; rows are padded to these, because oneDNN makes a
# kernel for each number.
SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# Names of linears that get the same rows in transformers' attention and feed-forward,
# so that they are computed together.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
)

# Classes of modules that choose experts, and names of linears that do. These stay
# floats.
ROUTER = re.compile("(Router|Gate|Gating)$")
ROUTERS = "gate", "router"

# Numbers of rows for which a kernel is checked: one for each variant of the compiled
# code, including tiles.
ROWS_CHECKED = (11, 7, 4, 2, 1)

# Results of checks, by kernel and shape: why the kernel is not used; empty: it is
# exact.
checked: dict[tuple[str, torch.Size, tuple[int, ...]], str] = {}


class IntegerLinear(nn.Module):
    """A linear with an int8 weight, [outputs, inputs], and a bias, [outputs]."""

    def __init__(self, weights: Weights, number: int, bias: Tensor | None):
        super().__init__()
        self.in_features = weights.inputs
        self.out_features = weights.outputs[number]
        self.bias = None if bias is None else bias.detach().float()
        # ``number`` is this linear's index among those that share ``weights``.
        self._weights, self._number = weights, number

    @property
    def nbytes(self) -> int:
        """Memory of the weight and its scales, in bytes."""
        return self.out_features * (self.in_features + 4)

    def forward(self, given: Tensor) -> Tensor:
        """Return the product; ``given`` is [..., inputs], the result has its dtype."""
        found = self._weights.product(given, self._number)
        if self.bias is not None:
            found.add_(self.bias)
        if found.dtype is not given.dtype:
            found = found.to(given.dtype)
        return found.view(*given.shape[:-1], self.out_features)


class Weights:
    """Int8 weights and scales of linears that are given the same rows."""

    def __init__(self, weights: Sequence[Stored]) -> None:
        integers, scale = weights[0]
        if len(weights) > 1:
            integers = torch.cat([integers for integers, _ in weights])
            scale = torch.cat([scale for _, scale in weights])
        self.outputs = [len(scale) for _, scale in weights]
        self.inputs = integers.shape[1]
        # The first linear's matmul computes the other linears' outputs as well: query,
        # key and value in one call.
        self._given: Tensor | None = None
        self._found: list[Tensor | None] = []
        self._kernel = packed(integers, scale, self.outputs)

    def product(self, given: Tensor, number: int) -> Tensor:
        """Return the product of one of the linears, [rows, outputs], float32."""
        found = self._found[number] if given is self._given else None
        # The first linear always computes anew, so that results of a failed step are
        # never used.
        if number == 0 or found is None:
            rows = given.reshape(-1, self.inputs).float()
            self._given, self._found = given, [*self._kernel.products(rows)]
            found = self._found[number]
            assert found is not None
        self._found[number] = None
        if not any(left is not None for left in self._found):
            self._given = None
        return found


class Kernel(Protocol):
    """Packed weights of linears that are given the same rows."""

    def __init__(
        self, integers: Tensor, scale: Tensor, outputs: Sequence[int]
    ) -> None: ...

    def products(self, rows: Tensor) -> list[Tensor]:
        """Return each linear's results, [rows, outputs]; ``rows`` is float32."""


class TorchKernel:
    """A kernel that multiplies and scales with operators of torch."""

    def __init__(self, integers: Tensor, scale: Tensor, outputs: Sequence[int]) -> None:
        self._outputs = tuple(outputs)
        self.pack(integers, scale)

    def pack(self, integers: Tensor, scale: Tensor) -> None:
        raise NotImplementedError

    def size(self, count: int) -> int:
        """Return the number of rows of a call for ``count`` rows, padding included."""
        raise NotImplementedError

    def sums(self, given: Tensor) -> Tensor:
        """Return sums times the outputs' scales, [rows, outputs], float32."""
        # ``given``: numbers from -64 to 64, which are rounded to integers, in place.
        raise NotImplementedError

    def products(self, rows: Tensor) -> list[Tensor]:
        count = len(rows)
        both = rows.new_empty((self.size(2 * count), rows.shape[1]))
        factor = as_integers(rows, both[:count], both[count : 2 * count])
        both[2 * count :] = 0.0
        sums = self.sums(both)
        found = sums[:count].add_(sums[count : 2 * count], alpha=1 / FINER)
        return [part * factor for part in found.split_with_sizes(self._outputs, -1)]


def as_integers(rows: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Write rows to ``high`` and ``low`` (not rounded); return each row's factor."""
    factor = rows.abs().amax(-1, keepdim=True)
    factor.add_(factor * 0.0)  # a row with an infinite number becomes NaN
    factor.clamp_(min=1e-30).mul_(1 / LEVELS)
    torch.div(rows, factor, out=low)
    torch.round(low, out=high)
    low.sub_(high).mul_(FINER)
    return factor


class OneDnn(TorchKernel):
    def pack(self, integers: Tensor, scale: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(integers, None)
        self._scale, self._zeros = scale, torch.zeros(len(scale), dtype=torch.int64)

    def size(self, count: int) -> int:
        largest = SIZES[-1]
        if count > largest:
            return -(-count // largest) * largest
        return SIZES[bisect_left(SIZES, count)]

    def sums(self, given: Tensor) -> Tensor:
        # The addition rounds, because its result has no fraction bits. The last byte of
        # the result is the integer.
        integers = given.add_(ROUNDING + SHIFT).view(torch.int32).to(torch.uint8)
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(integers, 1.0, SHIFT, self._packed),
            *(self._scale, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return found


class Fbgemm(TorchKernel):
    def pack(self, integers: Tensor, scale: Tensor) -> None:
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            # Ignore the warning that torch will remove quantized tensors: oneDNN is
            # used then.
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch._make_per_channel_quantized_tensor(
                integers, scale.double(), zeros, 0
            )
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)

    def size(self, count: int) -> int:
        return max(2, count)

    def sums(self, given: Tensor) -> Tensor:
        operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        found: Tensor = operator(given.round_(), 1.0, SHIFT, self._packed)
        return found


def kernels() -> list[type[Kernel]]:
    """Return the kernels to try on this processor, the fastest one first."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    has_vnni = known.get("avx512_vnni", True) or known.get("avx_vnni", False)
    if has_vnni or "fbgemm" not in torch.backends.quantized.supported_engines:
        return [CompiledProducts, OneDnn]
    return [CompiledProducts, Fbgemm, OneDnn]


def packed(integers: Tensor, scale: Tensor, outputs: Sequence[int]) -> Kernel:
    """Return packed weights; raises ModelFailedError if no kernel computes them."""
    errors = []
    for make in kernels():
        key = make.__name__, integers.shape, tuple(outputs)
        try:
            kernel = make(integers, scale, outputs)
            if key not in checked:
                checked[key] = _error_of(kernel, integers, scale)
            if not checked[key]:
                return kernel
            errors.append(f"{make.__name__}: {checked[key]}")
        except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
            errors.append(f"{make.__name__}: {error}")
    raise ModelFailedError(
        f"quantization: int8 is not possible here: with torch {torch.__version__}, no "
        f"kernel computes exact sums ({'; '.join(errors)}); remove quantization"
    )


def _error_of(kernel: Kernel, integers: Tensor, scale: Tensor) -> str:
    """Return how a kernel's results differ from exact ones; empty if they do not."""
    chance = torch.Generator().manual_seed(0)
    rows = torch.randn(
        ROWS_CHECKED[0], integers.shape[1], generator=chance, dtype=torch.float32
    )
    rows[0] = (LEVELS - 0.5) * rows[0].sign()  # gives the largest high and low integers
    rows[0, 0] = LEVELS
    found = torch.cat(kernel.products(rows), -1)
    for count in ROWS_CHECKED:
        some = torch.cat(kernel.products(rows[:count]), -1)
        if not torch.equal(some, found[:count]):
            return f"its matmul of {count} rows gives different results"
    high, low = torch.empty_like(rows), torch.empty_like(rows)
    factor = as_integers(rows, high, low)
    for begin in range(0, len(integers), 4096):
        here = slice(begin, begin + 4096)
        weight = integers[here].double().t()
        coarse, fine = (
            (part.double() @ weight).float() * scale[here]
            for part in (high, low.round())
        )
        wanted = (coarse + fine * (1 / FINER)) * factor
        if not torch.equal(found[:, here], wanted):
            return "its sums are not exact"
    return ""


def quantized(weight: Tensor) -> Stored:
    """Return a weight as integers, and the scale of each output."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), dtype=torch.float32)
    # In parts, because the head of a model is large.
    for begin in range(0, len(weight), 4096):
        part = weight[begin : begin + 4096].float()
        largest = part.abs().amax(1) / 127
        largest[largest == 0] = 1.0
        scale[begin : begin + 4096] = largest
        integers[begin : begin + 4096] = (
            (part / largest[:, None]).round().clamp(-127, 127)
        )
    return integers, scale


def quantize_linears(
    module: nn.Module, stored: Mapping[nn.Module, Stored] | None = None
) -> None:
    """Replace the linears of a module, in place; ``stored``: known int8 weights."""
    stored = stored or {}
    for holder in list(module.modules()):
        for names in _groups(holder, stored):
            linears = [getattr(holder, name) for name in names]
            pairs = [stored.get(one) or quantized(_weight(one)) for one in linears]
            weights = Weights(pairs)
            for number, (name, linear) in enumerate(zip(names, linears, strict=True)):
                # This frees the linear's weights, unless embeddings share them.
                setattr(holder, name, IntegerLinear(weights, number, linear.bias))


def _groups(
    holder: nn.Module, stored: Mapping[nn.Module, Stored]
) -> list[tuple[str, ...]]:
    """Return the names of a module's linears, with siblings grouped."""
    is_router = ROUTER.search(type(holder).__name__) is not None
    names = [
        name
        for name, found in holder.named_children()
        if is_linear(found) and (found in stored or not (is_router or name in ROUTERS))
    ]
    known = SIBLINGS if type(holder).__module__.startswith("transformers.") else ()
    found = [group for group in known if {*group} <= {*names}]
    grouped = {name for group in found for name in group}
    return found + [(name,) for name in names if name not in grouped]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _weight(linear: Any) -> Tensor:
    weight: Tensor = linear.weight.detach()
    return weight if isinstance(linear, nn.Linear) else weight.t()
