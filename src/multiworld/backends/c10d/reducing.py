"""Reductions of what Gloo cannot reduce itself, by way of what it can. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends.reduction import combiner, op_name
from multiworld.errors import UnsupportedOperationError

_WIDER = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""dtypes that Gloo cannot reduce, and where the same sum can be had (modulo 2^bits)."""

_ON_BOOL = {
    "SUM": ReduceOp.MAX,
    "MAX": ReduceOp.MAX,
    "BOR": ReduceOp.MAX,
    "PRODUCT": ReduceOp.MIN,
    "MIN": ReduceOp.MIN,
    "BAND": ReduceOp.MIN,
    "BXOR": ReduceOp.BXOR,
}

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

Finish = Callable[[Tensor, Tensor], None]


def reducible(flat: Tensor, op: ReduceOp, size: int) -> tuple[Tensor, Any, Finish]:
    """Return what to reduce, with which operation, and how to bring the result back.

    Raises:
        UnsupportedOperationError: There is no way; all members find out alike.
    """
    combiner(op, flat.cpu() if flat.device.type != "cpu" else flat)
    name = op_name(op)
    native = getattr(ReduceOp, "SUM" if name == "AVG" else name)

    def finish(work: Tensor, result: Tensor) -> None:
        if name == "AVG":
            work.div_(size)
        if work.data_ptr() != result.data_ptr():
            result.copy_(work)  # a wider dtype; a view needs nothing

    if flat.dtype in _NATIVE:
        return flat, native, finish
    if flat.dtype is torch.bool:
        return flat.to(torch.uint8), _ON_BOOL[name], finish
    if flat.dtype in _WIDER and name != "AVG":
        return flat.to(_WIDER[flat.dtype]), native, finish
    if flat.dtype.is_complex and name in ("SUM", "AVG"):
        work = torch.view_as_real(flat)
        if work.dtype in _NATIVE:
            return work, native, finish
    raise UnsupportedOperationError(
        f"Gloo cannot reduce {flat.dtype} by {name}; use backend='direct', or convert"
    )
