"""Wire codes of torch's dtypes, and views of tensors as memory."""

from __future__ import annotations

import bisect
import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from multiworld.backends.header import MAX_NDIM
from multiworld.errors import TensorMismatchError

_AS_IT_IS = nullcontext()

# Names in the order of their wire codes. Only append: any other change needs a new
# protocol version.
_NAMES = (
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "bool",
    "bfloat16",
    "uint16",
    "uint32",
    "uint64",
    "complex32",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)

CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_NAMES)
}
DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in CODES.items()}
SIZES: dict[int, int] = {code: dtype.itemsize for dtype, code in CODES.items()}
UINT8 = CODES[torch.uint8]

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object
_WRITABLE = 0x200
_EMPTY = memoryview(bytearray())


def flat(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor with one dimension, whose stride is 1."""
    if tensor.numel() > 1:
        return tensor.view(-1)
    # A dimension with at most one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,))


def memory_of(tensor: Tensor) -> memoryview:
    """Return a writable view of a contiguous host tensor, which must outlive it."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return _EMPTY
    # numpy is not used, because it may be missing and does not support bfloat16.
    view: memoryview = _from_memory(tensor.data_ptr(), size, _WRITABLE)
    return view


def code_of(tensor: Tensor) -> int:
    code = CODES.get(tensor.dtype)
    if code is None:
        raise TensorMismatchError(
            f"tensors of {tensor.dtype} cannot be sent; convert to one of: "
            f"{', '.join(_NAMES)}"
        )
    return code


def require_host(tensor: object, what: str) -> Tensor:
    """Return ``tensor``, detached, if dense and on the host; errors name ``what``."""
    if not isinstance(tensor, Tensor):
        raise TensorMismatchError(
            f"{what} must be a torch.Tensor, not {type(tensor).__name__}; "
            "use send_object for small plain data"
        )
    if not tensor.is_cpu:
        raise TensorMismatchError(
            f"{what} is on {tensor.device}, but this world carries host tensors; "
            "call .cpu() first, or use backend='nccl'"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TensorMismatchError(
            f"{what} is nested, quantized or {tensor.layout}; send a dense tensor "
            "(.to_padded_tensor(), .dequantize(), .to_dense())"
        )
    if tensor.ndim > MAX_NDIM:
        raise TensorMismatchError(
            f"{what} has {tensor.ndim} dimensions; {MAX_NDIM} can be sent"
        )
    tensor = tensor.detach() if tensor.requires_grad else tensor
    if not _has_memory(tensor):
        raise TensorMismatchError(
            f"{what} is a {type(tensor).__name__} without memory of its own; use the "
            "tensor that it stands for (.wait(), .to_local(), .full_tensor())"
        )
    return tensor


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a host tensor's data pointer refers to readable elements."""
    try:
        where = tensor.untyped_storage() if tensor.storage_offset() else tensor
        return bool(where.data_ptr()) or not tensor.numel()
    except (RuntimeError, NotImplementedError):  # a fake tensor, which has no memory
        return False


def require_matching(
    tensors: Sequence[Tensor] | None,
    like: Tensor,
    what: str,
    *,
    size: int,
    check: Callable[[Tensor], Tensor],
    # If the tensors are written to, no two of them may share memory.
    is_written: bool = False,
) -> list[Tensor]:
    """Return each ``check(tensor)``; require one per rank with ``like``'s dtype and
    size."""
    count = 0 if tensors is None else len(tensors)
    if tensors is None or count != size:
        raise TensorMismatchError(
            f"{what} holds {count} tensors, but this world has {size} members; pass "
            "one tensor for each member"
        )
    checked = [check(tensor) for tensor in tensors]
    for rank, tensor in enumerate(checked):
        if (tensor.dtype, tensor.numel()) != (like.dtype, like.numel()):
            raise TensorMismatchError(
                f"{what}[{rank}] has {tensor.numel()} elements of {tensor.dtype}, but "
                f"must have {like.numel()} of {like.dtype}"
            )
    if is_written:
        _require_apart(checked, what)
    return checked


def require_receivable(tensor: Tensor, what: str) -> None:
    """Check that no two elements of a tensor share memory."""
    reach = 0
    # In a tensor without overlap, each stride exceeds the range of the smaller ones.
    for step, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            if step <= reach:
                raise TensorMismatchError(
                    f"{what} overlaps itself (expand, unfold or as_strided); use a "
                    "tensor whose elements have memory of their own"
                )
            reach += step * (count - 1)


def _require_apart(tensors: list[Tensor], what: str) -> None:
    """Check that no two contiguous tensors share memory."""
    for tensor in tensors:
        require_receivable(tensor, f"a tensor of {what}")
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for tensor in tensors
        if tensor.is_contiguous() and tensor.nbytes
    )
    for (_, end), (begin, _) in itertools.pairwise(ranges):
        if begin < end:
            raise TensorMismatchError(
                f"tensors of {what} share memory; give each rank's tensor memory of "
                "its own"
            )


def reached_by(tensors: Iterable[Tensor], targets: Iterable[Tensor]) -> list[bool]:
    """Return for each tensor whether its memory overlaps one of ``targets``."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(span for t in targets if (span := _span(t))[0] < span[1]):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    found = []
    for begin, end in map(_span, tensors):
        # The last range that begins before ``end``.
        at = bisect.bisect_left(merged, (end,)) - 1
        found.append(at >= 0 and begin < merged[at][1] and begin < end)
    return found


def _span(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((count - 1) * step for count, step in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous, without lazy conjugation or negation."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def written(target: Tensor) -> AbstractContextManager[object]:
    """Return a context in which ``target`` can be written: torch writes to an inference
    tensor only in inference mode, which is a state of the thread."""
    return torch.inference_mode() if target.is_inference() else _AS_IT_IS


def overwrite(target: Tensor, source: Tensor) -> None:
    with written(target):
        target.copy_(source)


def plain(tensor: Tensor) -> Tensor:
    """Return ``tensor`` contiguous, with lazy conjugation and negation applied."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()
