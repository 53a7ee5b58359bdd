"""Reductions of dtypes that Gloo lacks, through dtypes that it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends.dtypes import overwrite
from multiworld.backends.reduction import (
    begin_average,
    combiner,
    finish_average,
    op_name,
)
from multiworld.errors import UnsupportedOperationError

# The wider dtype in which to reduce each dtype that Gloo cannot reduce. After the
# conversion back, the results are equal modulo 2^bits.
_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}

# The uint8 operation that gives the result of each operation on bool.
_ON_BOOL = {
    "SUM": ReduceOp.MAX,
    "MAX": ReduceOp.MAX,
    "BOR": ReduceOp.MAX,
    "PRODUCT": ReduceOp.MIN,
    "MIN": ReduceOp.MIN,
    "BAND": ReduceOp.MIN,
    "BXOR": ReduceOp.BXOR,
}

_BITWISE = ("BAND", "BOR", "BXOR")
_COMPLEX = (torch.complex64, torch.complex128)

_HALF = (torch.float16, torch.bfloat16)

# Dtypes that Gloo reduces itself.
_NATIVE = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)


def _ordered(flat: Tensor, *, is_max: bool) -> Tensor:
    """Return integers that sort like ``flat``. NaN becomes the extreme, so that it wins
    as in torch; in Gloo, NaN does not win."""
    wide = flat if flat.dtype is torch.float64 else flat.float()
    integer = torch.int64 if wide.dtype is torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    bits = wide.view(integer)
    # The bits of negative floats, as integers, sort in reverse.
    order = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    order[wide.isnan()] = limits.max if is_max else limits.min
    return order


def _unordered(order: Tensor) -> Tensor:
    """Undo ``_ordered``; the extremes become NaN."""
    limits = torch.iinfo(order.dtype)
    bits = order ^ ((order >> (limits.bits - 1)) & limits.max)
    return bits.view(torch.float64 if order.dtype is torch.int64 else torch.float32)


class Reduction:
    """Plan for reducing tensors of the dtype of ``like`` with Gloo or NCCL."""

    def __init__(self, like: Tensor, op: ReduceOp, size: int, library: str) -> None:
        combiner(op, like)
        self._op, self._name, self._size = op, op_name(op), size
        name = "SUM" if self._name == "AVG" else self._name
        self.native_op: Any = getattr(ReduceOp, name)
        self._wider: torch.dtype | None = None
        self._is_complex = like.dtype.is_complex
        # On booleans, every operation but BXOR is a minimum or a maximum.
        is_bitwise = name in (["BXOR"] if like.dtype is torch.bool else _BITWISE)
        if library == "nccl" and is_bitwise:
            raise UnsupportedOperationError(
                f"NCCL cannot reduce {like.dtype} by {self._name}; use "
                "backend='direct', or convert the tensor"
            )
        self._is_ordered = (
            library == "gloo"
            and self._name in ("MIN", "MAX")
            and like.dtype.is_floating_point
        )
        if self._is_ordered:
            return
        if self._name == "AVG" and like.dtype in _HALF and library == "gloo":
            self._wider = torch.float32  # so that the average is rounded only once
            return
        if like.dtype in _NATIVE:
            return
        if like.dtype is torch.bool:
            self._wider, self.native_op = torch.uint8, _ON_BOOL[self._name]
        elif like.dtype in _WIDER and self._name != "AVG":
            self._wider = _WIDER[like.dtype]
        elif like.dtype not in _COMPLEX or name != "SUM":
            raise UnsupportedOperationError(
                f"Gloo cannot reduce {like.dtype} by {self._name}; use "
                "backend='direct', or convert the tensor"
            )

    def prepare(self, flat: Tensor) -> list[Tensor]:
        """Return ``flat`` and the tensor that Gloo reduces in its place.

        Both tensors may share memory. ``finish`` writes the result to ``flat``.
        """
        if self._is_ordered:
            return [flat, _ordered(flat, is_max=self._name == "MAX")]
        if self._wider is not None:
            work = flat.to(self._wider)
        else:
            work = torch.view_as_real(flat) if self._is_complex else flat
        begin_average(self._op, work, self._size)
        return [flat, work]

    def finish(self, work: Tensor, flat: Tensor) -> None:
        """Write the result from ``work``, which Gloo reduced, into ``flat``."""
        finish_average(self._op, work, self._size)
        if self._is_ordered:
            overwrite(flat, _unordered(work).to(flat.dtype))
        if self._wider is not None:
            overwrite(flat, work)
