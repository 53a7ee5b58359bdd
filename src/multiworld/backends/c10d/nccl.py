"""NCCL groups whose failure does not end the process.

NCCL does not notice a dead peer: its kernels spin. multiworld's failure detector
notices the loss, and the group is aborted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import Store

from multiworld.backends import torch_names

# Variables that torch reads when it constructs a group. These values disable the
# handler that aborts the process, the monitor that kills the process if the handler
# hangs, and dumps.
QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}

_environment_lock = threading.Lock()


@contextlib.contextmanager
def quiet_environment() -> Iterator[None]:
    """Set ``QUIET`` inside the block only: the program's groups keep the watchdog."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in QUIET}
        os.environ.update(QUIET)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def make_nccl(
    store: Store, rank: int, size: int, device: torch.device, timeout_s: float
) -> Any:
    """Return an NCCL group that is connected, and can be aborted at any time."""
    # The group is non-blocking, so that a call returns even if a peer is dead. It
    # connects now, so that an unreachable peer fails the join, not the first operation.
    options = torch_names.nccl_options(timeout_s)
    with quiet_environment(), torch.cuda.device(device):
        group = torch_names.nccl_class()(store, rank, size, options)
    # Connect without ``_environment_lock``: connecting waits for the other members,
    # which may be connecting another world with this process.
    with torch.cuda.device(device):
        group.eager_connect_single_device(device)
    return group


def wait_for(work: Any, device: torch.device) -> None:
    """Block until a ``Work`` has completed on its device, or its group is aborted."""
    with torch.cuda.device(device):
        work.wait()  # makes only this thread's CUDA stream wait for the work
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()


class Aborter:
    """Aborts groups together: every abort flag is set before any abort waits."""

    def __init__(self) -> None:
        # An abort waits until the device frees memory, and so perhaps for kernels of
        # other communicators. If those kernels spin for the same dead peer (its loss
        # breaks all its worlds in one loop iteration), both aborts wait forever.
        # Healthy worlds on the device are not aborted: their kernels finish.
        self._lock = threading.Lock()
        self._due: list[Any] = []

    def add(self, native: Any) -> None:
        with self._lock:
            self._due.append(native)

    def abort_all(self) -> list[threading.Thread]:
        """Abort all queued groups at once; return the threads that do it."""
        with self._lock:
            due, self._due = self._due, []
        threads = [
            threading.Thread(target=_abort, args=(native,), name="multiworld-abort")
            for native in due
        ]
        for thread in threads:
            thread.start()
        return threads


def _abort(native: Any) -> None:
    # Ignore errors: if one group cannot be aborted, the others still must be.
    with contextlib.suppress(RuntimeError):
        native.abort()


aborter = Aborter()  # one for the process, because several managers can share a device
