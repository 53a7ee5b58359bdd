"""Attention by compiled code (``attention.c``): a row has the same bits in any step.

One call for each layer appends the keys and values of a step, and attends for all its
rows, in float32 on a CPU. A row's result follows from its sequence alone, on every
processor with AVX2. Other steps are torch's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from multiworld.serve.generation.replica.kv_cache import Attention, KvCache, Rows
from multiworld.serve.models import compiled_code

SOURCE = Path(__file__).with_name("attention.c")

LANES = 8  # a head's size is a multiple of it
MAX_SIZE = 256

AttentionOf = Callable[[KvCache, Sequence[Rows]], Attention]


class Form(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "size", "values")),
        *((f"{name}_head", ctypes.c_int64) for name in ("query", "key", "value")),
        *((f"{name}_row", ctypes.c_int64) for name in ("query", "key", "value")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


@functools.cache
def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, attend = ctypes.c_void_p, found.multiworld_attend
    attend.argtypes = (*[pointer] * 5, ctypes.c_long, pointer, ctypes.c_int)
    attend.restype = None
    return found


@functools.cache
def can_attend() -> bool:
    """Return whether the code is compiled, and the processor has its instructions."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # torch has been told to use fewer, or the processor has no more
    try:
        return bool(compiled_code.library(SOURCE).multiworld_can_attend())
    except NotImplementedError:
        return False


def compiled(otherwise: AttentionOf) -> AttentionOf:
    """Return attention by compiled code, or else by ``otherwise``."""
    return (
        functools.partial(CompiledAttention, otherwise) if can_attend() else otherwise
    )


class CompiledAttention:
    """Attention of one step; layers that the code is not for are ``otherwise``'s."""

    def __init__(
        self, otherwise: AttentionOf, cache: KvCache, rows: Sequence[Rows]
    ) -> None:
        self._otherwise, self._cache, self._rows = otherwise, cache, rows
        self._attend = _typed(compiled_code.library(SOURCE)).multiworld_attend
        self._threads = torch.get_num_threads()
        self._other: Attention | None = None
        # By shapes and strides, which are those of most layers; None: ``otherwise``'s.
        self._forms: dict[object, Form | None] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        query, key, value = _dense(query), _dense(key), _dense(value)
        name = (
            *(query.shape, query.stride(), query.dtype),
            *(key.shape, key.stride(), key.dtype),
            *(value.shape, value.stride(), value.dtype),
            *(scale, window, softcap),
        )
        if name not in self._forms:
            self._forms[name] = self._form(query, key, value, scale, window, softcap)
        form = self._forms[name]
        if form is None:
            if self._other is None:
                self._other = self._otherwise(self._cache, self._rows)
            return self._other.attend(
                *(layer, query, key, value),
                scale=scale,
                window=window,
                softcap=softcap,
            )
        rows = self._cache.addresses(self._rows, layer, (key, value))
        found = torch.empty(query.shape[1], query.shape[0], value.shape[2])
        self._attend(
            ctypes.addressof(form),
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            rows.buffer_info()[0],
            len(self._rows),
            found.data_ptr(),
            self._threads,
        )
        return found

    def _form(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Form | None:
        """Return the form of such tensors, and allocate memory for the rows."""
        given = query, key, value
        count = sum(each.count for each in self._rows)
        if any(each.shape[1] != count for each in given):
            raise ValueError(f"the step has {count} rows, unlike these tensors")
        if softcap is not None or not all(map(_is_for, given)):
            return None
        if self._other is None:
            self._cache.granule = self._cache.block_size
        self._cache.make_room(self._rows)
        heads, _, size = query.shape
        strides = [each.stride() for each in given]
        by_head = (head for head, _, _ in strides)
        by_row = (row for _, row, _ in strides)
        factor = size**-0.5 if scale is None else scale
        sizes = heads, len(key), size, value.shape[2]
        return Form(*sizes, *by_head, *by_row, window or 0, factor)


def _is_for(given: Tensor) -> bool:
    size = given.shape[2]
    is_float = given.dtype is torch.float32 and given.device.type == "cpu"
    return is_float and size % LANES == 0 and size <= MAX_SIZE


def _dense(given: Tensor) -> Tensor:
    """Return a tensor whose rows have their numbers side by side."""
    return given if given.stride(2) == 1 else given.contiguous()
