"""Source files of imported factories, and whether they have changed since."""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType

from multiworld.errors import SpecError

# Size and time of modification of source files when they were imported, by path.
_sources: dict[str, tuple[int, int]] = {}


def note(module: ModuleType) -> None:
    """Note the files of a factory's code."""
    for path in _files_of(module):
        with contextlib.suppress(OSError):
            _sources.setdefault(path, _stat_of(path))


def check(factory: str) -> None:
    """Raise SpecError if a factory's code has changed since it was imported."""
    module = sys.modules.get(factory.partition(":")[0])
    for path in () if module is None else _files_of(module):
        with contextlib.suppress(OSError):
            if path in _sources and _stat_of(path) != _sources[path]:
                raise SpecError(
                    f"{path} has changed, but new replicas would run the code that was "
                    "imported when the service started; give the new code another "
                    "module, or restart the service"
                )


def _files_of(module: ModuleType) -> list[str]:
    """Return the files of a module, and of those in its folder that it imports."""
    first = getattr(module, "__file__", None)
    if not isinstance(first, str):
        return []
    folder = os.path.join(os.path.dirname(first), "")
    found, waiting = {first}, [module]
    while waiting:
        for name in _imports_of(waiting.pop()):
            other = sys.modules.get(name)
            path = getattr(other, "__file__", None)
            if other is None or not isinstance(path, str):
                continue
            if path.startswith(folder) and path not in found:
                found.add(path)
                waiting.append(other)
    return sorted(found)


def _imports_of(module: ModuleType) -> set[str]:
    """Return the names of the modules that a module's source may import."""
    try:
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
    except (OSError, ValueError, SyntaxError):  # not of Python, or half written
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = (module.__package__ or "").split(".")
            above = above[: len(above) - node.level + 1] if node.level else []
            name = ".".join(filter(None, (*above, node.module)))
            found |= {name, *(f"{name}.{alias.name}" for alias in node.names)}
    return found


def _stat_of(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns
