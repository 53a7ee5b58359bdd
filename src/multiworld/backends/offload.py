"""Threads for large copies and reductions, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

# Work on more would block the loop for a millisecond; a thread costs a tenth of it.
OFFLOAD_BYTES = 4 * 1024 * 1024


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


async def offload(size_bytes: int, call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, run ``in_thread`` above ``OFFLOAD_BYTES``."""
    if size_bytes <= OFFLOAD_BYTES:
        return call(*args)
    return await in_thread(call, *args)


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, run in a thread; a cancellation waits for the thread."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *args))
    cancelled = None
    # Otherwise the thread would continue to write to the caller's memory.
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()
