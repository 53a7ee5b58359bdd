"""Tests that a change most likely breaks: ``python -m tests.meta.affected``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.meta.imports import SOURCE, imported

ROOT = Path(__file__).parents[2]
FOLDERS = ("unit", "contract", "integration", "faults")
SLOW = ("faults", "integration")
"""Folders of which at most ``FEW`` files are chosen; ``make test`` runs all."""
FEW = 6


def changed_files(base: str | None) -> set[Path]:
    """Return the files that differ from ``base``, new ones included.

    By default, ``base`` is the last commit or, if nothing differs from that, the one
    before it.
    """

    def git(*words: str) -> list[str]:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
        )
        return done.stdout.split("\n")

    new = git("ls-files", "--others", "--exclude-standard", "src", "tests")
    found = [*git("diff", "--name-only", base or "HEAD"), *new]
    if base is None and not any(found):
        found = git("diff", "--name-only", "HEAD~1")
    return {ROOT / name for name in found if name}


def affected(changed: Iterable[Path], tests: Iterable[Path]) -> list[Path]:
    """Return the tests that changed, or use a changed module, also by a helper."""
    changed = set(changed)
    source = [path for path in changed if path.is_relative_to(SOURCE)]
    names = {".".join(("multiworld", *_parts(path, SOURCE))) for path in source}
    inside = [path for path in changed if path.is_relative_to(ROOT / "tests")]
    helpers = {".".join(_parts(path, ROOT)) for path in inside}
    found = [
        path for path in tests if path in changed or _uses(path) & (names | helpers)
    ]
    chosen, slow = [], Counter[str]()
    for path in found:
        folder = path.relative_to(ROOT / "tests").parts[0]
        slow[folder] += folder in SLOW
        if path in changed or slow[folder] <= FEW:
            chosen.append(path)
    return chosen


def _parts(path: Path, base: Path) -> tuple[str, ...]:
    parts = path.relative_to(base).with_suffix("").parts
    return tuple(part for part in parts if part != "__init__")


def _uses(path: Path) -> set[str]:
    """Return the imports of a test and of the helpers that it imports."""
    found = set(imported(path))
    for name in imported(path):
        helper = ROOT / f"{name.replace('.', '/')}.py"
        if name.startswith("tests.") and helper.exists():
            found |= imported(helper)
    return found


def every_test() -> list[Path]:
    """Return the files of all tests that run in one process or in a few."""
    folders = (ROOT / "tests" / folder for folder in FOLDERS)
    return [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]


def main() -> None:
    found = affected(changed_files(os.environ.get("BASE")), every_test())
    paths = ["tests/meta", *(str(path.relative_to(ROOT)) for path in found)]
    sys.stdout.write(" ".join(paths) + "\n")


if __name__ == "__main__":
    main()
