"""Freed memory that the allocator keeps."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return freed memory to the system, within milliseconds and without the GIL.

    glibc keeps freed memory for the thread that freed it. Without this call, loading
    tokenizers in several threads in turn would take the memory once per thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
