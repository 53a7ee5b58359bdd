"""Attention by compiled code (``layers.c``): a row has the same bits in any step.

On a CPU, one call for each layer appends the keys and values of a step and computes the
attention of all its rows. A row's result depends only on its sequence, and has the same
bits on every processor with AVX2. torch computes the layers that this code does not
support. torch also computes prompts in bfloat16, because this code does not use the
bfloat16 matmul instructions of processors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multiworld.serve.engine.compute.kv_cache import KvCache, Rows, StepAttention
from multiworld.serve.engine.compute.layer_code import (
    DTYPES,
    LANES,
    Form,
    can_run,
    library,
)
from multiworld.serve.engine.models.attention import Attention, AttentionCall

MAX_SIZE = 256  # maximum head size
SMALL = 64  # maximum head size in a step of a single sequence
SHORT = 512  # maximum number of keys of a prefill chunk
FLOAT32 = (torch.float32,)

AttentionOf = Callable[[KvCache, Sequence[Rows]], Attention]


def compiled(otherwise: AttentionOf) -> AttentionOf:
    """Return compiled attention, or ``otherwise`` if it cannot run here."""
    return functools.partial(CompiledAttention, otherwise) if can_run() else otherwise


def fastest(cache: KvCache, rows: Sequence[Rows]) -> Attention:
    """Return the attention that is likely to be the fastest for a step."""
    # torch's attention is faster in some cases. It takes 0.5 to 0.8 times as long for
    # chunks of long prompts (2,000 keys, AVX512), 0.2 to 0.6 times for all chunks in
    # bfloat16 (AMX), and 0.3 to 0.6 times for a single row with large heads.
    is_long = any(r.count > 1 and r.begin + r.count > SHORT for r in rows)
    if is_long or not can_run():
        return StepAttention(cache, rows)
    max_size = MAX_SIZE if len(rows) > 1 else SMALL
    dtypes = DTYPES if all(r.count == 1 for r in rows) else FLOAT32
    return CompiledAttention(StepAttention, cache, rows, max_size, dtypes)


class CompiledAttention(Attention):
    """Attention of one step; ``otherwise`` computes layers that C does not support."""

    def __init__(
        self,
        otherwise: AttentionOf,
        cache: KvCache,
        rows: Sequence[Rows],
        max_size: int = MAX_SIZE,
        dtypes: Sequence[torch.dtype] = FLOAT32,
    ) -> None:
        self._otherwise, self._cache, self._rows = otherwise, cache, rows
        self._max_size, self._dtypes = max_size, dtypes
        self._attend = library().multiworld_attend
        self._threads = torch.get_num_threads()
        self._other: Attention | None = None
        # Forms of calls, by shapes and strides; most layers share one. None: the C code
        # does not support the call, so ``otherwise`` computes it.
        self._forms: dict[object, Form | None] = {}

    def compute(self, call: AttentionCall) -> Tensor:
        query, key, value = map(_dense, (call.query, call.key, call.value))
        name = (
            *(query.shape, query.stride(), query.dtype),
            *(key.shape, key.stride(), key.dtype),
            *(value.shape, value.stride(), value.dtype),
            *(call.scale, call.window, call.softcap),
        )
        if name not in self._forms:
            self._forms[name] = self._form(query, key, value, call)
        form = self._forms[name]
        if form is None:
            if self._other is None:
                self._other = self._otherwise(self._cache, self._rows)
            return self._other.compute(call)
        rows = self._cache.addresses(self._rows, call.layer, (key, value))
        found = call.empty()
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
        call: AttentionCall,
    ) -> Form | None:
        """Return the form of a call, and allocate memory; None: C cannot run it."""
        given = query, key, value
        count = sum(each.count for each in self._rows)
        if any(each.shape[1] != count for each in given):
            raise ValueError(
                f"query, key and value must have {count} rows, like the step"
            )
        is_large = max(query.shape[2], value.shape[2]) > self._max_size
        if call.softcap is not None or is_large or not all(map(_is_for, given)):
            return None
        if query.dtype not in self._dtypes or {key.dtype, value.dtype} != {query.dtype}:
            return None
        # Check the arguments here, because the C code does not.
        same = len(key) == len(value) and query.shape[2] == key.shape[2]
        if not same or not len(key) or len(query) % len(key):
            shapes = ", ".join(str(tuple(each.shape)) for each in given)
            raise ValueError(f"shapes of query, key and value do not match: {shapes}")
        if self._other is None:
            self._cache.granule = self._cache.block_size
        self._cache.make_room(self._rows)
        heads, _, size = query.shape
        strides = [each.stride() for each in given]
        by_head = (head for head, _, _ in strides)
        by_row = (row for _, row, _ in strides)
        sizes = heads, len(key), size, value.shape[2]
        is_bf16 = query.dtype is torch.bfloat16
        return Form(*sizes, *by_head, *by_row, call.window or 0, is_bf16, call.factor)


def _is_for(given: Tensor) -> bool:
    size = given.shape[2]
    return given.device.type == "cpu" and size % LANES == 0


def _dense(given: Tensor) -> Tensor:
    """Return a tensor in which each row is contiguous."""
    return given if given.stride(2) == 1 else given.contiguous()
