"""The version of a file that other programs replace, such as a certificate."""

from __future__ import annotations

import os
from pathlib import Path


def version_of(path: Path | str) -> tuple[int, int]:
    """Return a value that changes when a file is replaced; zeros if unreadable."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_ino
