"""Modules, names and paths of code that the documents mention."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    ROOT / "examples" / "README.md",
    *(p for p in (ROOT / "docs").rglob("*.md") if p.parent.name != "decisions"),
]
"""Every page but the decisions, which describe the code of their time."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_code_exists(page: Path) -> None:
    """Names are paths of modules, dotted names, and arguments of ``python -m``."""
    text = page.read_text()
    known = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for path in re.findall(r"`([\w/]+/\w+\.py)`", text):
        assert any(name.endswith(f"/{path}") for name in known), path
    for name in re.findall(r"\bmultiworld(?:\.[A-Za-z_]\w*)+(?::\w+)?(?!\.?\w)", text):
        assert _exists(name), name
    for module in re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", text):
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module


def _exists(name: str) -> bool:
    """Return whether a dotted name leads to a module or to something in one."""
    parts = name.replace(":", ".").split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return parts[1:] == ["md"]  # the page of the API
            found = getattr(found, part)
        return True
    return False
