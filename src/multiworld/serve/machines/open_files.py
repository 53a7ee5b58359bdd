"""The limit of a process's open files."""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Let this process and its children open as many files as the machine allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
