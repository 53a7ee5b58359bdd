"""Reduce operations on host tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends import dtypes
from multiworld.errors import UnsupportedOperationError

# Reduces its second argument into its first.
Combine = Callable[[Tensor, Tensor], object]

_COMBINERS: dict[str, Combine] = {
    "SUM": lambda total, other: total.add_(other),
    "AVG": lambda total, other: total.add_(other),
    "PRODUCT": lambda total, other: total.mul_(other),
    "MIN": lambda total, other: torch.minimum(total, other, out=total),
    "MAX": lambda total, other: torch.maximum(total, other, out=total),
    "BAND": lambda total, other: total.bitwise_and_(other),
    "BOR": lambda total, other: total.bitwise_or_(other),
    "BXOR": lambda total, other: total.bitwise_xor_(other),
}

OP_CODES = {name: code for code, name in enumerate(_COMBINERS, start=1)}
OP_NAMES = {code: name for name, code in OP_CODES.items()}


def op_name(op: ReduceOp) -> str:
    for name in OP_CODES:
        if op == getattr(ReduceOp, name):
            return name
    raise UnsupportedOperationError(
        f"{op} is not supported; use one of {', '.join(OP_CODES)}"
    )


def combiner(op: ReduceOp, like: Tensor) -> Combine:
    """Return ``combine(total, other)``, which reduces into ``total``; AVG only sums."""
    # Check first: an operation that the dtype lacks then fails at every member before
    # any of them sends.
    return _checked(op_name(op), like.dtype)


@functools.cache
def _checked(name: str, dtype: torch.dtype) -> Combine:
    combine = _COMBINERS[name]
    one = torch.ones(1, dtype=torch.uint8).to(dtype)
    try:
        combine(one, one.clone())
        if name == "AVG":
            one.div_(2)
    except (RuntimeError, TypeError) as error:  # TypeError from torch 2.15 on
        raise UnsupportedOperationError(
            f"{name} does not exist for {dtype} ({error}); convert the tensor, or "
            "use another operation"
        ) from error

    def reduced(total: Tensor, other: Tensor) -> object:
        with dtypes.written(total):
            return combine(total, other)

    return reduced


def begin_average(op: ReduceOp, own: Tensor, size: int) -> None:
    """Scale a member's part of an average in place, so that the sum cannot overflow.

    Divides by a power of two, which is exact; ``finish_average`` divides by the rest.
    """
    if op_name(op) == "AVG" and is_scaled(own.dtype):
        with dtypes.written(own):
            own.div_(_power_above(size))


def finish_average(op: ReduceOp, total: Tensor, size: int) -> None:
    """For AVG, divide the sum in place by the factor that ``begin_average`` left."""
    if op_name(op) == "AVG":
        power = _power_above(size) if is_scaled(total.dtype) else 1
        with dtypes.written(total):
            total.div_(size / power if power > 1 else size)


def is_scaled(dtype: torch.dtype) -> bool:
    """Return whether averages of a dtype are scaled before they are summed."""
    return dtype.is_floating_point or dtype.is_complex


def _power_above(size: int) -> int:
    """Return the smallest power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()
