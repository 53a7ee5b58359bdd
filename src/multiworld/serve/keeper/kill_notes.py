"""Notes from the keeper to the controller: why the keeper killed a gateway."""

from __future__ import annotations

import contextlib
from pathlib import Path

PREFIX = "killed-"


def leave(folder: Path, pid: int, why: str) -> None:
    """Write a note before the kill, so that it exists when the process ends."""
    with contextlib.suppress(OSError):  # for instance, the disk is full
        (folder / f"{PREFIX}{pid}").write_text(why)


def take(folder: Path, pid: int) -> str:
    """Return why the keeper has killed a process; empty if it has not."""
    path = folder / f"{PREFIX}{pid}"
    try:
        why = path.read_text()
        path.unlink()
        return why
    except OSError:
        return ""


def clear(folder: Path) -> None:
    """Remove the notes of an earlier keeper, whose process ids may be reused."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            path.unlink()
