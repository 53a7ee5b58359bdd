"""Threads for large copies and reductions, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

T = TypeVar("T")

# Work on more bytes than this runs in a thread: it would block the event loop for over
# 1 ms, and using a thread costs a tenth of that.
OFFLOAD_BYTES = 4 * 1024 * 1024


def size_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# One pool for each event loop. The default pool is not used, because it may be full of
# calls that wait for such work.
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, Executor] = WeakKeyDictionary()


def _pool_of(loop: asyncio.AbstractEventLoop) -> Executor:
    if loop not in _pools:
        # Named like the threads of the default pool, which leak checks ignore.
        _pools[loop] = ThreadPoolExecutor(thread_name_prefix="asyncio_multiworld")
    return _pools[loop]


async def offload(size_bytes: int, call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, run ``in_thread`` above ``OFFLOAD_BYTES``."""
    if size_bytes <= OFFLOAD_BYTES:
        return call(*args)
    return await in_thread(call, *args)


async def in_thread(call: Callable[..., T], *args: Any) -> T:
    """Return ``call(*args)``, run in a thread; a cancellation waits for the thread."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(loop.run_in_executor(_pool_of(loop), call, *args))
    cancelled = None
    # Wait even if this task is cancelled: the thread may still be writing to the
    # caller's memory.
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
