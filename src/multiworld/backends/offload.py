"""Large copies and reductions, off the event loop. Shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")

OFFLOAD_BYTES = 4 * 1024 * 1024
"""Work on more than this goes to a thread: it would hold up the loop for a millisecond
or more, and a thread costs a tenth of that."""


def size_of(*tensors: Tensor) -> int:
    """Return the bytes of all ``tensors`` together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


async def offload(size_bytes: int, call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, from a thread if it works on many bytes.

    Cancellation: waits for the thread, which would go on writing, and then raises.
    """
    if size_bytes <= OFFLOAD_BYTES:
        return call(*args)
    task = asyncio.ensure_future(asyncio.to_thread(call, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()
        raise
