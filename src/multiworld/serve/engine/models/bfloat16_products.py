"""Matmuls with bfloat16 weights in compiled code (``bfloat16_products.c``).

For few rows, torch's matmuls read weights at a third to a half of the memory bandwidth.
This code reads weights once, at full bandwidth, and sums every output in a fixed order:
a row has the same bits in a call of any size, with any number of threads.
"""

from __future__ import annotations

import ctypes
import hashlib
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from multiworld.serve.engine.models.compiled_code import BLOCK, Library, in_blocks

SOURCE = Path(__file__).with_name("bfloat16_products.c")

DIGEST = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]

PAIR = 2  # number of inputs that one instruction multiplies and adds
TILE = 32  # number of inputs in a row of a tile
TILE_ROWS = 32  # number of rows that tiles take at once


class Instructions(IntEnum):
    """Kinds of instructions that the compiled code uses, as in the C code."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    BF16 = 3
    AMX = 4


library = Library(SOURCE, multiply="pplpii")


class Packed(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
    )


class Bfloat16Linear:
    """A linear for the compiled code; raises NotImplementedError without that code."""

    def __init__(
        self,
        weight: Tensor,  # [outputs, inputs], bfloat16
        bias: Tensor | None,  # [outputs]
        kind: Instructions | None = None,  # None: the best kind
    ) -> None:
        self._multiply = library().multiworld_multiply
        self._kind = best() if kind is None else kind
        if self._kind is Instructions.NONE:
            raise NotImplementedError("the compiled code needs at least AVX2")
        self.outputs, self.inputs = weight.shape
        multiple = TILE if self.inputs >= TILE else PAIR
        self._inputs = -(-self.inputs // multiple) * multiple
        # Keep the tensors alive, because ``_packed`` has their addresses.
        self._weights = in_blocks(weight.detach(), self._inputs, PAIR)
        self._bias = torch.zeros(-(-self.outputs // BLOCK) * BLOCK)
        if bias is not None:
            self._bias[: self.outputs] = bias.detach().float()
        addresses = self._weights.data_ptr(), self._bias.data_ptr()
        self._packed = Packed(*addresses, self.outputs, self._inputs)
        self._address = ctypes.addressof(self._packed)

    @property
    def is_invariant(self) -> bool:
        """Whether rows have the same bits in calls of any size."""
        # AMX tiles may round differently from the instructions for few rows.
        return self._kind is not Instructions.AMX

    def __call__(self, given: Tensor) -> Tensor:
        """Return the product; ``given`` is [..., inputs], bfloat16."""
        rows = given.reshape(-1, self.inputs).contiguous()
        count = len(rows)
        needs_room = self._kind is Instructions.AMX and count % TILE_ROWS
        if needs_room or self._inputs != self.inputs:
            size = -(-count // TILE_ROWS) * TILE_ROWS
            filled = rows.new_zeros(size, self._inputs)
            filled[:count, : self.inputs] = rows
            rows = filled
        found = torch.empty(count, self.outputs, dtype=torch.bfloat16)
        self._multiply(
            self._address,
            rows.data_ptr(),
            count,
            found.data_ptr(),
            torch.get_num_threads(),
            self._kind,
        )
        return found.view(*given.shape[:-1], self.outputs)


def best() -> Instructions:
    return Instructions(library.best())


def instructions() -> str:
    """Return a name for the code and its instructions; empty if it cannot run."""
    # The results depend on both the code and its instructions.
    try:
        kind = best()
    except NotImplementedError:
        return ""
    return "" if kind is Instructions.NONE else f"{DIGEST} {kind.name}"
