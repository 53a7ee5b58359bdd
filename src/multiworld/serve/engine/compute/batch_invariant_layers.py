"""Batch-invariant layers: a row's results are bit-identical in every batch.

A kernel may sum a row in a different order when the call has more rows, which changes
the last bits of the result. Which row counts are affected depends on the processor, the
library and the number of threads. So each row count is tested once, when a stage is
loaded, and used only if every row has the same bits as in a call with ``REFERENCE``
rows.

torch computes elementwise functions with vector instructions, except for the remainder
of each thread's slice. Scalar instructions compute the remainder, and their results
differ in the last bits (SiLU, GELU, tanh). Which elements are in a remainder depends on
the numbers of rows and threads. Here the size of every slice is a multiple of
``VECTORS``, so there is no remainder.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from multiworld.serve.engine.compute.hardware_fingerprint import known
from multiworld.serve.engine.models.bfloat16_products import Bfloat16Linear
from multiworld.serve.engine.models.packed_linear import PackedLinear

# Candidate numbers of rows in a call. None is below 4: separate kernels compute fewer
# rows.
ROWS = (4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256)
REFERENCE = 16  # rows of the reference calls, with which other calls are compared
# Minimum number of outputs to compare: in bfloat16, only a few outputs differ.
OUTPUTS = 250_000
# Maximum number of multiplications in a tested call, which takes some hundredths of a
# second on one core.
MAX_PRODUCTS = 1e9

# Elements per thread above which torch adds a thread (GRAIN_SIZE in TensorIterator.h).
GRAIN = 32_768
# Row sizes that are multiples of this many elements leave no remainder for the vector
# loops of any processor: two vectors of bfloat16 with AVX512.
VECTORS = 64
# Elementwise functions: all classes of this module of transformers, and these of torch.
ACTIVATIONS = "transformers.activations"
ELEMENTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
ROTATED = 8  # rotary embeddings are computed for multiples of this many positions


def cover(sizes: Sequence[int], count: int) -> list[int]:
    """Return the sizes of calls that together cover ``count`` rows."""
    found = [sizes[-1]] * (count // sizes[-1])
    rest = count % sizes[-1]
    if rest:
        found.append(next(size for size in sizes if size >= rest))
    return found


def invariant_rows(function: Callable[[Tensor], Tensor], example: Tensor) -> list[int]:
    """Return the row counts for which a function gives each row the same bits."""
    # ``function`` maps [rows, inputs] to [rows, outputs], row by row.
    width = example.shape[1]
    outputs = function(example).shape[1]
    limit = max(REFERENCE, int(MAX_PRODUCTS / (width * outputs)))
    sizes = [size for size in ROWS if size <= limit]
    chance = torch.Generator().manual_seed(0)
    count = max(sizes)
    for _ in range(max(1, -(-OUTPUTS // (count * outputs)))):
        given = torch.randn(count + REFERENCE, width, generator=chance).to(example)
        wanted = torch.cat([function(part) for part in torch.split(given, REFERENCE)])
        for size in list(sizes):
            # Two offsets, so that each row is tested with different neighbours.
            for begin in (0, REFERENCE // 2 + 1):
                here = slice(begin, begin + size)
                if not torch.equal(function(given[here].contiguous()), wanted[here]):
                    sizes.remove(size)
                    break
    return sizes or [REFERENCE]


def _filled_up(rows: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, int]]:
    """Yield parts of allowed sizes, each with the number of zero rows that pad it."""
    begin = 0
    for size in cover(sizes, len(rows)):
        part = rows[begin : begin + size]
        lacking = size - len(part)
        if lacking:
            part = torch.cat([part, part.new_zeros(lacking, part.shape[1])])
        yield part, lacking
        begin += size


class InvariantRows:
    """A batch-invariant version of a function that maps rows one by one."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], sizes: Sequence[int]
    ) -> None:
        self._function, self._sizes = function, list(sizes)

    def __call__(self, given: Tensor) -> Tensor:
        rows = given.reshape(-1, given.shape[-1])
        found = []
        for part, lacking in _filled_up(rows, self._sizes):
            out = self._function(part)
            found.append(out[:-lacking] if lacking else out)
        if not found:  # there are no rows, for instance if a step needs no logits
            found.append(self._function(rows))
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out.reshape(*given.shape[:-1], out.shape[-1])


Routed = Tensor | tuple[Tensor, ...]


class InvariantRouter:
    """A batch-invariant version of a router, which chooses the experts of each row."""

    def __init__(
        self, function: Callable[[Tensor], Routed], sizes: Sequence[int]
    ) -> None:
        self._function, self._sizes = function, list(sizes)

    def __call__(self, given: Tensor) -> Routed:
        rows = given.reshape(-1, given.shape[-1])
        found, is_one = [], False
        for part, lacking in _filled_up(rows, self._sizes):
            outs = self._function(part)
            is_one = isinstance(outs, Tensor)
            found.append([out[: len(out) - lacking] for out in _each(outs)])
        outs = tuple(map(torch.cat, zip(*found, strict=True)))
        return outs[0] if is_one else outs


def _each(outs: Routed) -> tuple[Tensor, ...]:
    return (outs,) if isinstance(outs, Tensor) else outs


def make_routers_invariant(module: nn.Module) -> None:
    """Make the routers of a module batch-invariant, in place."""
    for found in module.modules():
        each: Any = found
        function, weight = found.forward, getattr(found, "weight", None)
        is_router = type(found).__name__.endswith("Router")
        if not is_router or len(inspect.signature(function).parameters) != 1:
            continue  # ``check_layers`` tests routers with more arguments
        if isinstance(weight, Tensor) and weight.ndim == 2:
            sizes = _sizes_of(
                f"{type(found).__name__} {tuple(weight.shape)} {weight.dtype}",
                functools.partial(_numbers, function),
                weight.new_zeros(1, weight.shape[1]),
            )
            each.forward = InvariantRouter(function, sizes)


def _numbers(router: Callable[[Tensor], Routed], given: Tensor) -> Tensor:
    return torch.cat([out.float() for out in _each(router(given))], -1)


def _sizes_of(
    key: str, function: Callable[[Tensor], Tensor], example: Tensor
) -> list[int]:
    """Return ``invariant_rows`` of a function, from the cache if tested before."""
    with torch.inference_mode():
        return known(
            f"rows of {key}, of {ROWS}",
            torch.get_num_threads(),
            functools.partial(invariant_rows, function, example),
        )


def make_linears_invariant(module: nn.Module) -> None:
    """Make every matmul (``Linear``, ``Conv1D``) of a module batch-invariant."""
    sizes: dict[str, list[int]] = {}
    for found in module.modules():
        is_product = isinstance(found, nn.Linear) or type(found).__name__ == "Conv1D"
        weight = getattr(found, "weight", None)
        if not is_product or not isinstance(weight, Tensor):
            continue
        packed: Any = found.forward
        if isinstance(packed, Bfloat16Linear) and packed.is_invariant:
            continue
        if isinstance(packed, PackedLinear | Bfloat16Linear):
            width, shape = (
                packed.inputs,
                f"({packed.outputs}, {packed.inputs}) {type(packed).__name__}",
            )
        else:
            width = weight.shape[1 if isinstance(found, nn.Linear) else 0]
            shape = str(tuple(weight.shape))
        kind = f"{type(found).__name__} {shape} {weight.dtype} on {weight.device.type}"
        key = f"{kind}, bias {found.bias is not None}"
        if key not in sizes:
            sizes[key] = _sizes_of(key, found.forward, weight.new_zeros(1, width))
        found.forward = InvariantRows(found.forward, sizes[key])


def whole_slices(count: int, threads: int) -> int:
    """Return how many of ``count`` elements one call can take without a remainder."""
    for slices in range(min(threads, -(-count // GRAIN)), 1, -1):
        whole = count - count % (VECTORS * slices)
        if min(threads, -(-whole // GRAIN)) == slices:
            return whole
    return count if count <= GRAIN or threads == 1 else GRAIN


class _State(threading.local):
    is_inside = False


_state = _State()


def is_inside() -> bool:
    """Return whether this thread is in a call of ``InvariantElements``."""
    return _state.is_inside


class InvariantElements:
    """A batch-invariant version of an elementwise function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, given: Tensor) -> Tensor:
        was_inside, _state.is_inside = _state.is_inside, True
        try:
            return self._computed(given)
        finally:
            _state.is_inside = was_inside

    def _computed(self, given: Tensor) -> Tensor:
        width = given.shape[-1]
        rest = -width % VECTORS
        padded = functional.pad(given, (0, rest)) if rest else given.contiguous()
        flat = padded.view(-1)
        threads, found = torch.get_num_threads(), []
        while True:
            whole = whole_slices(len(flat), threads)
            found.append(self._function(flat[:whole]))
            flat = flat[whole:]
            if not len(flat):
                break
        out = (found[0] if len(found) == 1 else torch.cat(found)).view(padded.shape)
        return out[..., :width] if rest else out


class InvariantRotary:
    """Rotary embeddings whose bits do not depend on the other positions of a step."""

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._function = function
        self._max_positions = 0

    def __call__(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        count = position_ids.shape[-1]
        positions = functional.pad(position_ids, (0, -count % ROTATED))
        max_positions = self._max_positions or ROTATED
        found = []
        begin = 0
        while begin < positions.shape[-1]:
            here = positions[..., begin : begin + max_positions]
            found.append(self._function(x, here, *args, **kwargs))
            begin += here.shape[-1]
            if not self._max_positions:
                size = found[0][0].shape[-1]
                self._max_positions = max_positions = (
                    max(1, GRAIN // size // ROTATED) * ROTATED
                )
        cosines, sines = (
            torch.cat(parts, -2)[..., :count, :] for parts in zip(*found, strict=True)
        )
        return cosines, sines


def make_elements_invariant(module: nn.Module) -> None:
    """Make a module's activations and rotary embeddings batch-invariant, in place."""
    for found in module.modules():
        each: Any = found
        kind = type(found)
        if kind.__module__ == ACTIVATIONS or kind in ELEMENTWISE:
            each.forward = InvariantElements(found.forward)
        elif type(found).__name__.endswith("RotaryEmbedding"):
            each.forward = InvariantRotary(found.forward)
