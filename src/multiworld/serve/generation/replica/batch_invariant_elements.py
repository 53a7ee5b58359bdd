"""Element by element functions that give each number the same bits.

torch computes such a function with vector instructions, and the numbers left at the end
of each thread's slice one by one, by other instructions with other last bits (SiLU,
GELU, tanh). Which numbers those are depends on the number of rows and threads. Here
every slice is a multiple of ``VECTORS`` numbers, and nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

GRAIN = 32_768
"""Numbers from which torch uses another thread (``GRAIN_SIZE`` in TensorIterator.h)."""

VECTORS = 64
"""Numbers that every processor's vector loop takes without a rest: two vectors of
bfloat16 with AVX512."""

ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
"""Modules whose classes are such functions."""

ROTATED = 8
"""Positions that rotary embeddings are computed for at once, or multiples of them."""


def whole_slices(count: int, threads: int) -> int:
    """Return how many of some numbers are in slices without a rest.

    Args:
        count: Number of numbers, a multiple of ``VECTORS``.
        threads: Threads of torch.
    """
    for slices in range(min(threads, -(-count // GRAIN)), 1, -1):
        whole = count - count % (VECTORS * slices)
        if min(threads, -(-whole // GRAIN)) == slices:
            return whole
    return count if count <= GRAIN or threads == 1 else GRAIN


class FixedElements:
    """A function of numbers, one by one, that gives each the same bits.

    Args:
        function: Takes a tensor of any shape, and returns one of the same shape.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def __call__(self, given: Tensor) -> Tensor:
        """Return the function of each number."""
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


class FixedRotary:
    """Rotary embeddings whose bits do not depend on the other positions of a step.

    Args:
        function: Takes hidden states, [1, rows, hidden], and positions, [1, rows], and
            returns cosines and sines, [1, rows, size].
    """

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._function = function
        self._most = 0

    def __call__(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions."""
        count = position_ids.shape[-1]
        positions = functional.pad(position_ids, (0, -count % ROTATED))
        most = self._most or ROTATED
        found = []
        begin = 0
        while begin < positions.shape[-1]:
            here = positions[..., begin : begin + most]
            found.append(self._function(x, here, *args, **kwargs))
            begin += here.shape[-1]
            if not self._most:
                size = found[0][0].shape[-1]
                self._most = most = max(1, GRAIN // size // ROTATED) * ROTATED
        cosines, sines = (
            torch.cat(parts, -2)[..., :count, :] for parts in zip(*found, strict=True)
        )
        return cosines, sines


def fix_elements(module: nn.Module) -> None:
    """Let a module's activations and rotary embeddings give the same bits always.

    Args:
        module: Its activation functions and rotary embeddings are changed.
    """
    for found in module.modules():
        each: Any = found
        if type(found).__module__ in ACTIVATIONS:
            each.forward = FixedElements(found.forward)
        elif type(found).__name__.endswith("RotaryEmbedding"):
            each.forward = FixedRotary(found.forward)
