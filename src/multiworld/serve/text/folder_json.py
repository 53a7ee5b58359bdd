"""The JSON files of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from multiworld.errors import SpecError


def read_json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"cannot read {path}: {error}; give the folder of a Hugging Face model"
        ) from error
    return found


def read_if_there(path: Path) -> dict[str, Any]:
    """Return the content of a file; an empty dict if the file does not exist."""
    return read_json(path) if path.exists() else {}
