"""The folder for what is made once on a machine and kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder: ``MULTIWORLD_CACHE``, or one in the home."""
    given = os.environ.get("MULTIWORLD_CACHE")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "multiworld"
