"""The limit on a process's open files."""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Raise this process's and its children's limit to the hard limit; return that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
