"""Attention by compiled code (``attention.c``): a row has the same bits in any step.

One call for each layer appends the keys and values of a step, and attends for all its
rows, in float32 on a CPU. A row's result follows from its sequence alone, on every
processor with AVX2. Layers of other kinds are torch's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from multiworld.serve.generation.replica.kv_cache import (
    Attention,
    KvCache,
    Rows,
    StepAttention,
)
from multiworld.serve.models import compiled_code

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("attention.c")

LANES = 8  # a head's size is a multiple of it
MAX_SIZE = 256
SMALL = 64  # heads up to this size are small
SHORT = 512  # prompts up to this number of tokens are short

DIGEST = "fd738002805741e9"
"""Of the result of ``digest`` on every processor."""

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
    """Return whether the code is compiled, and right on this processor."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # torch has been told to use fewer, or the processor has no more
    try:
        if not compiled_code.load(SOURCE).multiworld_can_attend():
            return False
    except NotImplementedError:
        return False
    found = digest()
    if found != DIGEST:
        logger.warning("compiled attention is wrong here (%s), torch's is used", found)
    return found == DIGEST


def digest() -> str:
    """Return a digest of the bits of an attention that is always the same."""
    numbers = torch.arange(120 * 64 * 6)
    query, key, value = (
        (numbers[: heads * 120 * 64] * step % 2003 - 1001).float().view(heads, 120, 64)
        for heads, step in ((6, 7919), (2, 31), (2, 77))
    )
    cache, rows = KvCache(), [Rows(0, 0, 120)]
    attention = CompiledAttention(StepAttention, cache, rows)
    given = query / 512, key / 512, value / 512
    found = attention.attend(0, *given, window=100)
    bits: bytes = found.numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()[:16]


def compiled(otherwise: AttentionOf) -> AttentionOf:
    """Return attention by compiled code, or else by ``otherwise``."""
    return (
        functools.partial(CompiledAttention, otherwise) if can_attend() else otherwise
    )


def fastest(cache: KvCache, rows: Sequence[Rows]) -> Attention:
    """Return the attention that is likely to be the fastest for a step.

    torch's takes less time for chunks of long prompts (0.5 to 0.8 times with 2,000
    keys, AVX512), and for one row alone if heads are large (0.3 to 0.6 times).
    """
    is_long = any(r.count > 1 and r.begin + r.count > SHORT for r in rows)
    if is_long or not can_attend():
        return StepAttention(cache, rows)
    max_size = MAX_SIZE if len(rows) > 1 else SMALL
    return CompiledAttention(StepAttention, cache, rows, max_size)


class CompiledAttention:
    """Attention of one step; layers that the code is not for are ``otherwise``'s."""

    def __init__(
        self,
        otherwise: AttentionOf,
        cache: KvCache,
        rows: Sequence[Rows],
        max_size: int = MAX_SIZE,
    ) -> None:
        self._otherwise, self._cache, self._rows = otherwise, cache, rows
        self._max_size = max_size
        self._attend = _typed(compiled_code.load(SOURCE)).multiworld_attend
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
        found = query.new_empty((query.shape[1], query.shape[0], value.shape[2]))
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
        is_large = max(query.shape[2], value.shape[2]) > self._max_size
        if softcap is not None or is_large or not all(map(_is_for, given)):
            return None
        # C does not check what it is given.
        same = len(key) == len(value) and query.shape[2] == key.shape[2]
        if not same or not len(key) or len(query) % len(key):
            shapes = ", ".join(str(tuple(each.shape)) for each in given)
            raise ValueError(f"query, key and value do not fit together: {shapes}")
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
    return is_float and size % LANES == 0


def _dense(given: Tensor) -> Tensor:
    """Return a tensor whose rows have their numbers side by side."""
    return given if given.stride(2) == 1 else given.contiguous()
