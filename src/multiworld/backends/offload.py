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

    Cancellation: see ``in_thread``.
    """
    if size_bytes <= OFFLOAD_BYTES:
        return call(*args)
    return await in_thread(call, *args)


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, from a thread.

    Cancellation: waits for the thread, which would go on writing, however often it is
    asked for, and then raises.
    """
    task = asyncio.ensure_future(asyncio.to_thread(call, *args))
    cancelled = None
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
