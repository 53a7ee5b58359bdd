"""The C functions of decoder layers (``layers.c``), and whether they can run here."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from array import array
from pathlib import Path

import torch
from torch import Tensor

from multiworld.serve.engine.models.compiled_code import Library

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("layers.c")

DTYPES = (torch.float32, torch.bfloat16)
LANES = 8  # numbers in a vector; the sizes of rows and heads must be multiples of it

DIGEST = "a1483ae402855df4"
"""Result of ``digest`` on every processor."""

_TOKENS, _SIZE = 120, 64  # number of tokens, and head size, of the inputs of ``digest``


class Form(ctypes.Structure):
    """Sizes and strides of an attention call, as in the C code."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "size", "values")),
        *((f"{name}_head", ctypes.c_int64) for name in ("query", "key", "value")),
        *((f"{name}_row", ctypes.c_int64) for name in ("query", "key", "value")),
        ("window", ctypes.c_int64),
        ("bf16", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


library = Library(
    SOURCE,
    attend="ppppplpi",
    norm="ppppfllpii",
    rotate="ppppppfllllii",
    gate="pplii",
)


@functools.cache
def can_run() -> bool:
    """Return whether the code is available, and correct on this processor."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # the processor has no AVX2, or torch is configured not to use it
    try:
        if not library().multiworld_can_run():
            return False
    except NotImplementedError:
        return False
    found = digest()
    if found != DIGEST:
        logger.warning(
            "compiled layers give wrong results here (%s); using torch instead", found
        )
    return found == DIGEST


def digest() -> str:
    """Return a digest of results whose bits must be the same everywhere."""
    results = [each for dtype in DTYPES for each in _results(dtype)]
    bits = b"".join(each.view(torch.uint8).numpy().tobytes() for each in results)
    return hashlib.sha256(bits).hexdigest()[:16]


def _results(dtype: torch.dtype) -> tuple[Tensor, ...]:
    is_bf16 = dtype is torch.bfloat16
    code, form = library(), _form(is_bf16)
    query, key, value = (
        _waves(heads, step).to(dtype) for heads, step in ((6, 7919), (2, 31), (2, 77))
    )
    memory = torch.zeros(2, 2, _TOKENS, _SIZE, dtype=dtype)
    addresses = [each.data_ptr() for each in memory]
    rows = array("q", [*addresses, _TOKENS, 0, _TOKENS, 0])
    found = torch.empty(_TOKENS, 6, _SIZE, dtype=dtype)
    given = [each.data_ptr() for each in (query, key, value)]
    at = rows.buffer_info()[0]
    code.multiworld_attend(ctypes.addressof(form), *given, at, 1, found.data_ptr(), 1)
    # Use the same numbers as hidden states: [120, 6 x 64] and [120, 2 x 64].
    wide, narrow = query.flatten(), key.flatten()
    both, normed = torch.empty_like(wide), torch.empty_like(wide)
    weight, x, out = value.data_ptr(), wide.data_ptr(), normed.data_ptr()
    width = 6 * _SIZE
    code.multiworld_norm(
        *(x, found.data_ptr(), both.data_ptr(), weight, 1e-5),
        *(_TOKENS, width, out, 1, is_bf16),
    )
    angles = both.data_ptr()
    sizes = _TOKENS, 6, 2, _SIZE
    code.multiworld_rotate(
        out, narrow.data_ptr(), angles, x, weight, 0, 1e-6, *sizes, 1, is_bf16
    )
    code.multiworld_gate(x, out, wide.numel(), 1, is_bf16)
    return found, both, normed, narrow, wide


def _waves(heads: int, step: int) -> Tensor:
    numbers = torch.arange(heads * _TOKENS * _SIZE)
    return ((numbers * step % 2003 - 1001).float() / 512).view(heads, _TOKENS, _SIZE)


def _form(is_bf16: bool) -> Form:
    strides = [_TOKENS * _SIZE] * 3 + [_SIZE] * 3
    return Form(6, 2, _SIZE, _SIZE, *strides, 100, is_bf16, _SIZE**-0.5)
