"""Memory that was freed, and that the allocator has kept."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return freed memory to the system; takes some milliseconds, without the GIL.

    glibc keeps what a thread frees for that thread: tokenizers that several threads
    load, one after the other, would take memory once for each thread.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
