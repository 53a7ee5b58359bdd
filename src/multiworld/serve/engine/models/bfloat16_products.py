"""Matmuls with bfloat16 weights in compiled code (``bfloat16_products.c``).

For few rows, torch's matmuls read weights at a third to a half of the memory bandwidth.
This code reads weights once, at full bandwidth, and sums every output in a fixed order:
a row has the same bits in a call of any size, with any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from multiworld.serve.engine.models import compiled_code

SOURCE = Path(__file__).with_name("bfloat16_products.c")

DIGEST = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:8]

BLOCK = 32  # number of outputs in a block
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
        self._weights = _blocks(weight.detach(), self._inputs)
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


def _blocks(weight: Tensor, inputs: int) -> Tensor:
    """Return weights, [outputs, inputs], in the layout that the C code reads."""
    outputs, given = weight.shape
    blocks = -(-outputs // BLOCK)
    filled = weight.new_zeros(blocks * BLOCK, inputs)
    filled[:outputs, :given] = weight
    return filled.view(blocks, BLOCK, -1, PAIR).transpose(1, 2).flatten()


def best() -> Instructions:
    """Return the best instructions that the processor and torch's settings allow."""
    found = Instructions(library().multiworld_best())
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX512"):
        return found
    return min(found, Instructions.AVX2 if capability == "AVX2" else Instructions.NONE)


def instructions() -> str:
    """Return a name for the code and its instructions; empty if it cannot run."""
    # The results depend on both the code and its instructions.
    try:
        kind = best()
    except NotImplementedError:
        return ""
    return "" if kind is Instructions.NONE else f"{DIGEST} {kind.name}"


@functools.cache
def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
    multiply = found.multiworld_multiply
    multiply.argtypes = pointer, pointer, count, pointer, number, number
    multiply.restype = None
    return found


def library() -> ctypes.CDLL:
    """Return the compiled code; raises NotImplementedError if it is not available."""
    return _typed(compiled_code.load(SOURCE))
