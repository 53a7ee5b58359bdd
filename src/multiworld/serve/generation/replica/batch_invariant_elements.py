"""Batch-invariant elementwise functions: bit-identical results for each number.

torch computes such a function with vector instructions, except for the remainder of
each thread's slice, which takes scalar instructions with other last bits (SiLU, GELU,
tanh). Which numbers are in the remainder depends on the number of rows and threads.
Here every slice is a multiple of ``VECTORS`` numbers, without a remainder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Numbers from which torch uses another thread (``GRAIN_SIZE`` in TensorIterator.h).
GRAIN = 32_768
# Numbers that every processor's vector loop takes without a remainder: two vectors of
# bfloat16 with AVX512.
VECTORS = 64
# Modules whose classes are such functions.
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
ROTATED = 8  # rotary embeddings are computed for multiples of this many positions


def whole_slices(count: int, threads: int) -> int:
    """Return how many of ``count`` numbers are in slices without a remainder."""
    for slices in range(min(threads, -(-count // GRAIN)), 1, -1):
        whole = count - count % (VECTORS * slices)
        if min(threads, -(-whole // GRAIN)) == slices:
            return whole
    return count if count <= GRAIN or threads == 1 else GRAIN


class InvariantElements:
    """A bit-identical version of an elementwise function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, given: Tensor) -> Tensor:
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
        if type(found).__module__ in ACTIVATIONS:
            each.forward = InvariantElements(found.forward)
        elif type(found).__name__.endswith("RotaryEmbedding"):
            each.forward = InvariantRotary(found.forward)
