"""NCCL groups that leave the process alive, and how they are aborted together.

What NCCL forces, and what is done about it:

- torch's own NCCL watchdog ends the process when a collective fails or stalls. It is
  switched off in every group made here, while that group is constructed; groups that
  the program makes itself are not touched.
- NCCL does not notice a dead peer: its kernels spin. Our watchdog notices, and aborts.
- An abort waits for the device to let go of memory, and so can wait for kernels of
  *other* communicators on that device. If those spin for the same dead peer, both wait
  for ever. So all groups that break in one turn of the loop, which is what the loss of
  one process does, are aborted at once, each in a thread of its own: every abort flag
  is set before any of them waits.
- Communicators of healthy worlds on the same device are not aborted: their kernels run
  on streams of their own and finish. They may be delayed while the abort lasts.
- After an abort a communicator is never destroyed, only forgotten: destroying it hangs
  on newer releases of NCCL.

Not run where this was written: there was no GPU. Tested against a fake.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Store

QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""What torch reads when a group is constructed: no handler that aborts the process, no
monitor that kills it when the handler hangs, no dumps meant for such an end."""

_environment_lock = threading.Lock()


@contextlib.contextmanager
def quiet_environment() -> Iterator[None]:
    """Set ``QUIET`` while a group is constructed, and put back what was there."""
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
    """Make a group whose communicator is connected now, and can be aborted at any time.

    Non-blocking: a call into NCCL returns though a peer is dead. Eager: a peer that
    cannot be reached fails the joining, not the first operation.
    """
    nccl: Any = torch._C._distributed_c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    with quiet_environment(), torch.cuda.device(device):
        group = nccl(store, rank, size, options)
        group.eager_connect_single_device(device)
    return group


def wait_for(work: Any, device: torch.device) -> None:
    """Wait until a work is done on its device; blocks, and is released by an abort."""
    with torch.cuda.device(device):
        work.wait()  # orders this thread's stream behind the work
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()


class Aborter:
    """Aborts groups together; see the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: list[Any] = []

    def add(self, native: Any) -> None:
        """Let a group be aborted at the next ``abort_all``."""
        with self._lock:
            self._due.append(native)

    def abort_all(self) -> list[threading.Thread]:
        """Abort everything that is due, all at once; return who is at it."""
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
    # A group that is broken in its own way cannot be helped, and must hurt nobody else.
    with contextlib.suppress(RuntimeError):
        native.abort()


aborter = Aborter()
"""One for the process: worlds of several managers can share a device."""
