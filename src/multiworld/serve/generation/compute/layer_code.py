"""The C code of decoders' layers (``layers.c``): its functions, and whether they can be
used on this processor."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
from array import array
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multiworld.serve.models import compiled_code

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("layers.c")

LANES = 8  # the sizes of rows and heads are multiples of it

DIGEST = "3a1585b5bfa28167"
"""Of the results of ``digest`` on every processor."""

_TOKENS, _SIZE = 120, 64  # tokens and head size of the inputs of ``digest``


class Form(ctypes.Structure):
    """Sizes and strides of an attention, as in the C code."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "size", "values")),
        *((f"{name}_head", ctypes.c_int64) for name in ("query", "key", "value")),
        *((f"{name}_row", ctypes.c_int64) for name in ("query", "key", "value")),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


@functools.cache
def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
    threads = ctypes.c_int
    types: dict[str, tuple[Any, ...]] = {
        "attend": (*[pointer] * 5, count, pointer, threads),
        "norm": (*[pointer] * 4, real, count, count, pointer, threads),
        "rotate": (*[pointer] * 6, real, *[count] * 4, threads),
        "gate": (pointer, pointer, count, threads),
    }
    for name, kinds in types.items():
        function = getattr(found, f"multiworld_{name}")
        function.argtypes, function.restype = kinds, None
    return found


def library() -> ctypes.CDLL:
    """Return the code; raises NotImplementedError if it cannot be had."""
    return _typed(compiled_code.load(SOURCE))


@functools.cache
def can_run() -> bool:
    """Return whether the code is compiled, and right on this processor."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # torch has been told to use fewer, or the processor has no more
    try:
        if not library().multiworld_can_run():
            return False
    except NotImplementedError:
        return False
    found = digest()
    if found != DIGEST:
        logger.warning("compiled layers are wrong here (%s), torch's are used", found)
    return found == DIGEST


def digest() -> str:
    """Return a digest of the bits of results that are always the same."""
    code, form = library(), _form()
    query, key, value = (
        _waves(heads, step) for heads, step in ((6, 7919), (2, 31), (2, 77))
    )
    memory = torch.zeros(2, 2, _TOKENS, _SIZE, dtype=torch.float32)
    addresses = [each.data_ptr() for each in memory]
    rows = array("q", [*addresses, _TOKENS, 0, _TOKENS, 0])
    found = torch.empty(_TOKENS, 6, _SIZE, dtype=torch.float32)
    given = [each.data_ptr() for each in (query, key, value)]
    at = rows.buffer_info()[0]
    code.multiworld_attend(ctypes.addressof(form), *given, at, 1, found.data_ptr(), 1)
    # The same numbers, as hidden states: [120, 6 x 64] and [120, 2 x 64].
    wide, narrow = query.flatten(), key.flatten()
    both, normed = torch.empty_like(wide), torch.empty_like(wide)
    weight, x, out = value.data_ptr(), wide.data_ptr(), normed.data_ptr()
    width = 6 * _SIZE
    code.multiworld_norm(
        x, found.data_ptr(), both.data_ptr(), weight, 1e-5, _TOKENS, width, out, 1
    )
    angles = both.data_ptr()
    sizes = _TOKENS, 6, 2, _SIZE
    code.multiworld_rotate(
        out, narrow.data_ptr(), angles, x, weight, 0, 1e-6, *sizes, 1
    )
    code.multiworld_gate(x, out, wide.numel(), 1)
    results = found, both, normed, narrow, wide
    bits = b"".join(each.numpy().tobytes() for each in results)
    return hashlib.sha256(bits).hexdigest()[:16]


def _waves(heads: int, step: int) -> Tensor:
    numbers = torch.arange(heads * _TOKENS * _SIZE)
    return ((numbers * step % 2003 - 1001).float() / 512).view(heads, _TOKENS, _SIZE)


def _form() -> Form:
    strides = [_TOKENS * _SIZE] * 3 + [_SIZE] * 3
    return Form(6, 2, _SIZE, _SIZE, *strides, 100, _SIZE**-0.5)
