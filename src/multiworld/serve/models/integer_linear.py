"""Matrix products in int8 with exact sums, for CPUs.

Weights have a byte, and a scale for each output. Each row of activations is scaled to
its largest magnitude and written as two integers of 7 bits, ``high + low / 128``, which
are two rows of one call. Sums of integers do not round, and what follows them is
exactly rounded: a row has the same bits in a call of any size, at any place, with any
number of threads, and on any processor. With 7 bits no kernel saturates, as kernels for
AVX2 would with 8 bits (two products are at most 2 x 128 x 127, which 16 bits hold).

oneDNN computes them, or FBGEMM where the processor has no instructions for products of
bytes (VNNI): there its kernels take a quarter of the time for up to 16 rows. The
results have the same bits.
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
from multiworld.serve.models.stored_integers import Stored

LEVELS = 63  # largest magnitude of an integer of activations
SHIFT = 64  # zero point: the operator takes unsigned activations
ROUNDING = 1.5 * 2**23  # float32 has no fractions from here on
FINER = 128  # steps of the low integer in one of the high; so it is at most 64

# Numbers of rows of a call of oneDNN, which makes a kernel for each; others are filled
# up.
SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

# Names of linears to which transformers' attention and feed-forward give the same rows.
SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
)

# Modules and names of linears that choose the experts of a mixture: these stay floats.
ROUTER = re.compile("(Router|Gate|Gating)$")
ROUTERS = "gate", "router"

CHECKED = 3  # rows of the product that is compared with exact sums

# Operators that have refused or miscomputed a shape here, and shapes that they compute:
# each shape has its kernels.
_checked: dict[tuple[str, torch.Size], str] = {}


class IntegerLinear(nn.Module):
    """A product with a weight, [outputs, inputs], in int8, and a bias, [outputs]."""

    def __init__(self, weights: Weights, begin: int, end: int, bias: Tensor | None):
        super().__init__()
        self.in_features, self.out_features = weights.inputs, end - begin
        self.bias = None if bias is None else bias.detach().float()
        # ``begin``: the first of its outputs.
        self._weights, self._outputs = weights, slice(begin, end)

    @property
    def nbytes(self) -> int:
        """Memory of the weight and its scales, in bytes."""
        return self.out_features * (self.in_features + 4)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def forward(self, given: Tensor) -> Tensor:
        """Return the product; ``given`` is [..., inputs], the result has its dtype."""
        product, scale = self._weights.product(given, self._outputs.start == 0)
        found = product[:, self._outputs] * scale
        if self.bias is not None:
            found.add_(self.bias)
        return found.to(given.dtype).view(*given.shape[:-1], self.out_features)


class Weights:
    """Weights in int8, and their scales, of linears that are given the same rows."""

    def __init__(self, weights: Sequence[Stored]) -> None:
        self._linears = len(weights)
        integers = torch.cat([integers for integers, _ in weights])
        scale = torch.cat([scale for _, scale in weights])
        self.inputs = integers.shape[1]
        # The first linear computes for all: an attention's query, key and value are one
        # call.
        self._given: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        self._waiting = 0
        self._kernel = packed(integers, scale)

    def product(self, given: Tensor, is_first: bool) -> tuple[Tensor, Tensor]:
        """Return the product, [rows, outputs], and each row's factor, [rows, 1]."""
        # Always for the first: nothing is left of a step that failed between two of
        # them.
        if is_first or given is not self._given or self._found is None:
            self._given, self._found = given, self._computed(given)
            self._waiting = self._linears
        found = self._found
        self._waiting -= 1
        if not self._waiting:
            self._given = self._found = None
        return found

    def _computed(self, given: Tensor) -> tuple[Tensor, Tensor]:
        rows = given.reshape(-1, self.inputs).float()
        count = len(rows)
        factor = rows.abs().amax(-1, keepdim=True)
        factor.clamp_(min=1e-30).mul_(1 / LEVELS)
        size = self._kernel.size(2 * count)
        both = rows.new_empty((size, self.inputs))
        high, low = both[:count], both[count : 2 * count]
        if size > 2 * count:
            both[2 * count :] = 0.0
        torch.div(rows, factor, out=low)
        torch.round(low, out=high)
        low.sub_(high).mul_(FINER)
        sums = self._kernel.sums(both)
        # A power of two: whether this is fused does not change the bits.
        found = sums[:count].add_(sums[count : 2 * count], alpha=1 / FINER)
        return found, factor


class Kernel(Protocol):
    """Packed weights."""

    def __init__(self, integers: Tensor, scale: Tensor) -> None: ...

    def size(self, count: int) -> int:
        """Return the number of rows of a call that holds ``count`` rows."""

    def sums(self, given: Tensor) -> Tensor:
        """Return sums times the outputs' scales, [rows, outputs], float32.

        ``given`` is overwritten: numbers from -64 to 64, which are rounded to integers.
        """


class OneDnn:
    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(integers, None)
        self._scale, self._zeros = scale, torch.zeros(len(scale), dtype=torch.int64)

    def size(self, count: int) -> int:
        largest = SIZES[-1]
        if count > largest:
            return -(-count // largest) * largest
        return SIZES[bisect_left(SIZES, count)]

    def sums(self, given: Tensor) -> Tensor:
        # The sum has no bits for fractions, so that it rounds, and its last byte is the
        # integer.
        integers = given.add_(ROUNDING + SHIFT).view(torch.int32).to(torch.uint8)
        found: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(integers, 1.0, SHIFT, self._packed),
            *(self._scale, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return found


class Fbgemm:
    def __init__(self, integers: Tensor, scale: Tensor) -> None:
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with warnings.catch_warnings():
            # Quantized tensors will be removed, and oneDNN is used then.
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
        return [OneDnn]
    return [Fbgemm, OneDnn]


def packed(integers: Tensor, scale: Tensor) -> Kernel:
    """Return packed weights; raises ModelFailedError if no operator computes them."""
    errors = []
    for make in kernels():
        key = make.__name__, integers.shape
        try:
            kernel = make(integers, scale)
            if key not in _checked:
                _checked[key] = _error_of(kernel, integers, scale)
            if not _checked[key]:
                return kernel
            errors.append(f"{make.__name__}: {_checked[key]}")
        except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
            errors.append(f"{make.__name__}: {error}")
    raise ModelFailedError(
        f"quantization: int8 needs an operator that torch {torch.__version__} lacks "
        f"here, or computes differently ({'; '.join(errors)}); remove quantization"
    )


def _error_of(kernel: Kernel, integers: Tensor, scale: Tensor) -> str:
    """Return an error unless sums are exact, and scaled in one rounding."""
    chance = torch.Generator().manual_seed(0)
    shape = CHECKED, integers.shape[1]
    given = torch.randint(-LEVELS, SHIFT + 1, shape, generator=chance)
    given[0] = SHIFT  # the largest sums
    found = kernel.sums(given + 0.25)
    exact = given.double()
    for begin in range(0, len(integers), 4096):
        here = slice(begin, begin + 4096)
        wanted = (exact @ integers[here].double().t()).float() * scale[here]
        if not torch.equal(found[:, here], wanted):
            return "its sums are not exact"
    return ""


def quantized(weight: Tensor) -> Stored:
    """Return a weight as integers, and the scale of each output."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for begin in range(0, len(weight), 4096):  # the head of a model is large
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
    """Replace the linears of a module, in place; those ``stored`` were quantized."""
    stored = stored or {}
    for holder in list(module.modules()):
        for names in _groups(holder, stored):
            linears = [getattr(holder, name) for name in names]
            pairs = [stored.get(one) or quantized(_weight(one)) for one in linears]
            weights, end = Weights(pairs), 0
            for name, linear, (integers, _) in zip(names, linears, pairs, strict=True):
                begin, end = end, end + len(integers)
                replaced = IntegerLinear(weights, begin, end, linear.bias)
                # This frees the weights, unless another module shares them, as
                # embeddings do.
                setattr(holder, name, replaced)


def _groups(
    holder: nn.Module, stored: Mapping[nn.Module, Stored]
) -> list[tuple[str, ...]]:
    """Return the names of a module's linears, together where they are siblings."""
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
