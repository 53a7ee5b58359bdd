"""Matmuls in int8 by compiled code (``integer_products.c``).

One call from Python replaces a dozen torch operators, and reads weights at full memory
bandwidth. The results have the same bits as torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from multiworld.serve.engine.models.compiled_code import BLOCK, Library, in_blocks

SOURCE = Path(__file__).with_name("integer_products.c")

INPUTS = 4  # number of inputs that one instruction multiplies and adds
TILE = 64  # number of inputs in a row of a tile
# Number of rows that tiles take at once; each has a high and a low row of integers.
TILE_ROWS = 16


class Instructions(IntEnum):
    """Kinds of instructions that the compiled code uses, as in the C code."""

    NONE = 0
    AVX2 = 1
    VNNI = 2
    AMX = 3


library = Library(SOURCE, multiply="ppllppii")


class Packed(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("linears", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
    )


class CompiledProducts:
    """Packed weights of linears that are given the same rows, for the compiled code.

    Raises NotImplementedError if the code is not available here.
    """

    def __init__(self, integers: Tensor, scale: Tensor, outputs: Sequence[int]) -> None:
        self._multiply = library().multiworld_multiply
        self._instructions = best()
        if self._instructions is Instructions.NONE:
            raise NotImplementedError("the compiled code needs at least AVX2")
        self._outputs, self._given = tuple(outputs), integers.shape[1]
        scale = scale.float()
        multiple = TILE if self._given >= TILE else INPUTS
        inputs = -(-self._given // multiple) * multiple
        weights = [
            _blocks(part, inputs) for part in integers.split_with_sizes(self._outputs)
        ]
        scales = [_filled(part) for part in scale.split_with_sizes(self._outputs)]
        # Keep the tensors alive, because ``_packed`` has their addresses.
        self._weights, self._scale = _joined(weights), _joined(scales)
        self._counts = torch.tensor(self._outputs, dtype=torch.int32)
        addresses = (
            each.data_ptr() for each in (self._weights, self._scale, self._counts)
        )
        self._packed = Packed(*addresses, len(self._outputs), inputs)
        self._address = ctypes.addressof(self._packed)
        self._inputs, self._total = inputs, sum(self._outputs)

    def products(self, rows: Tensor) -> list[Tensor]:
        """Return each linear's results, [rows, outputs]; ``rows`` is float32."""
        count, rows = len(rows), rows.contiguous()
        found = torch.empty(count * self._total, dtype=torch.float32)
        scratch = torch.empty(self._scratch(count), dtype=torch.uint8)
        self._multiply(
            self._address,
            rows.data_ptr(),
            count,
            self._given,
            found.data_ptr(),
            scratch.data_ptr(),
            torch.get_num_threads(),
            self._instructions,
        )
        results, end = [], 0
        for width in self._outputs:
            begin, end = end, end + count * width
            results.append(found[begin:end].view(count, width))
        return results

    def _scratch(self, count: int) -> int:
        """Return the bytes of scratch memory: integers, factor and sums of each row."""
        filled = -(-count // TILE_ROWS) * TILE_ROWS
        return filled * 2 * self._inputs + count * 3 * 4


def _blocks(integers: Tensor, inputs: int) -> Tensor:
    # Add 128, because the C code takes unsigned weights.
    return in_blocks(integers, inputs, INPUTS).view(torch.uint8).bitwise_xor_(128)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _filled(scale: Tensor) -> Tensor:
    filled = scale.new_zeros(-(-len(scale) // BLOCK) * BLOCK)
    filled[: len(scale)] = scale
    return filled


def best() -> Instructions:
    return Instructions(library.best())
