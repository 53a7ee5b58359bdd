"""Exit of a process whose device can no longer compute."""

from __future__ import annotations

import logging
import os
import sys

import torch

logger = logging.getLogger("multiworld.serve")

EXIT_BROKEN = 71  # exit code of a replica whose device is broken


def exit_if_broken(device: torch.device | str, error: BaseException) -> None:
    """Exit at once if, after ``error``, the process can compute nothing on its device.

    After some errors, such as an index out of range in a kernel or a fault of the
    hardware, each later call of CUDA fails, too, until the process ends (CUDA Runtime
    API, "Error Handling": sticky errors). Such a replica would fail every request, and
    get most of them, because it fails at once and so looks idle. Its work is replayed
    on others, and is refused if it kills those, too.
    """
    if str(device) == "cpu" or isinstance(error, torch.OutOfMemoryError):
        return
    try:
        torch.accelerator.synchronize(device)
    except Exception as broken:
        logger.critical("the device %s is broken: %s; %s", device, broken, error)
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)
