"""Cache of artifacts that are made once per machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return ``MULTIWORLD_CACHE``, or a folder in the home directory."""
    given = os.environ.get("MULTIWORLD_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "multiworld"
