"""Temporary folder of an engine; folders that killed replicas left are removed.

A killed replica cannot remove its folder, but the kernel releases its lock on the
folder. So the next replica on the host can tell which folders are unused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "multiworld-engine-"


class EngineFolder:
    """A new folder, which this process keeps locked until ``remove``."""

    def __init__(self) -> None:
        made = Path(tempfile.mkdtemp(prefix="multiworld-new-"))
        self._lock = _open(made)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Give the folder a name with ``PREFIX`` only once it is locked: starting
        # replicas remove unlocked folders with such names.
        self.path = made.rename(made.with_name(PREFIX + made.name.rpartition("-")[2]))
        _remove_unused(made.parent)

    def remove(self) -> None:
        """Remove the folder and its files; repeated calls do nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove_unused(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        try:
            lock = _open(path)
        except OSError:
            continue  # the folder belongs to another user, or was removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass  # the replica that locked the folder is still running
        finally:
            os.close(lock)
