"""Folders of the user, such as the cache of artifacts made once per machine."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from multiworld.errors import ServeError


def cache_folder() -> Path:
    """Return ``MULTIWORLD_CACHE``, or a folder in the home directory."""
    given = os.environ.get("MULTIWORLD_CACHE")
    if given:
        return Path(given).expanduser()
    return home_folder(".cache") / "multiworld"


def home_folder(name: str) -> Path:
    """Return a folder in the home directory, or else in the temporary directory."""
    # A container may run as a user without an entry in the password database, or with a
    # home directory that cannot be written to.
    try:
        found = Path.home() / name
    except RuntimeError:
        return _in_temporary_folder(name)
    is_usable = found.exists() or os.access(Path.home(), os.W_OK | os.X_OK)
    return found if is_usable else _in_temporary_folder(name)


def _in_temporary_folder(name: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"multiworld-home-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_own = found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode)
    if not is_own or found.st_mode & 0o077:
        raise ServeError(
            f"{folder}, used because this user has no writable home directory, is not "
            "a private folder of the user; set MULTIWORLD_STATE and MULTIWORLD_CACHE"
        )
    return folder / name
