"""The limit on a process's open files."""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Raise the limit of this process and its children to the hard limit; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
