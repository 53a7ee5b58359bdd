"""Sizes of operations that are bit-identical on this machine.

A kernel may sum a row in another order when the operation has more rows or columns;
then the row has other last bits. Which sizes are affected depends on processor, library
and number of threads. So they are tested once, when a stage is loaded: a size is used
only if each of its rows has the same bits as in an operation of the reference size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from multiworld.serve.generation.replica.hardware_fingerprint import known
from multiworld.serve.models.packed_linear import PackedLinear

# Tried numbers; fewer than 4 use kernels of their own.
ROWS = (4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256)
REFERENCE = 16  # rows; the others are compared with it
OUTPUTS = 250_000  # at least, to compare per size: in bfloat16 few of them differ
MAX_PRODUCTS = 1e9  # multiplications per size: a few hundredths of a second on one core


def cover(sizes: Sequence[int], count: int) -> list[int]:
    """Return sizes of operations that together cover ``count`` rows."""
    found = [sizes[-1]] * (count // sizes[-1])
    rest = count % sizes[-1]
    if rest:
        found.append(next(size for size in sizes if size >= rest))
    return found


def invariant_rows(function: Callable[[Tensor], Tensor], example: Tensor) -> list[int]:
    """Return the numbers of rows for which a function is bit-identical in every row."""
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
            # Also at other offsets than in the reference.
            for begin in (0, REFERENCE // 2 + 1):
                here = slice(begin, begin + size)
                if not torch.equal(function(given[here].contiguous()), wanted[here]):
                    sizes.remove(size)
                    break
    return sizes or [REFERENCE]


class InvariantRows:
    """A batch-invariant version of a function that maps rows one by one."""

    def __init__(
        self, function: Callable[[Tensor], Tensor], sizes: Sequence[int]
    ) -> None:
        self._function, self._sizes = function, list(sizes)

    def __call__(self, given: Tensor) -> Tensor:
        rows = given.reshape(-1, given.shape[-1])
        found = []
        begin = 0
        for size in cover(self._sizes, len(rows)):
            part = rows[begin : begin + size]
            lacking = size - len(part)
            if lacking:
                part = torch.cat([part, part.new_zeros(lacking, part.shape[1])])
            out = self._function(part)
            found.append(out[: size - lacking] if lacking else out)
            begin += size
        if not found:  # no rows, for instance if a step needs no logits
            found.append(self._function(rows))
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out.reshape(*given.shape[:-1], out.shape[-1])


def make_linears_invariant(module: nn.Module) -> None:
    """Make every matmul (``Linear``, ``Conv1D``) of a module batch-invariant."""
    sizes: dict[str, list[int]] = {}
    for found in module.modules():
        is_product = isinstance(found, nn.Linear) or type(found).__name__ == "Conv1D"
        weight = getattr(found, "weight", None)
        if not is_product or not isinstance(weight, Tensor):
            continue
        packed = found.forward if isinstance(found.forward, PackedLinear) else None
        if packed is not None:
            width, shape = packed.inputs, f"({packed.outputs}, {packed.inputs}) packed"
        else:
            width = weight.shape[1 if isinstance(found, nn.Linear) else 0]
            shape = str(tuple(weight.shape))
        kind = f"{type(found).__name__} {shape} {weight.dtype} on {weight.device.type}"
        key = f"{kind}, bias {found.bias is not None}"
        with torch.inference_mode():
            if key not in sizes:
                sizes[key] = known(
                    f"rows of {key}, of {ROWS}",
                    torch.get_num_threads(),
                    functools.partial(
                        invariant_rows, found.forward, weight.new_zeros(1, width)
                    ),
                )
        found.forward = InvariantRows(found.forward, sizes[key])
