"""Source files of factories, and whether they have changed since their import."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from multiworld.errors import SpecError

# Hashes of source files when they were imported, by path.
_sources: dict[str, str] = {}

# Modules in these folders are not recorded, because they are installed, not written for
# a model.
INSTALLED = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "purelib")
)
OWN = "multiworld."


def note(module: ModuleType) -> None:
    """Record the hashes of the source files of a factory's module."""
    for path in _files_of(module):
        with contextlib.suppress(OSError):
            if path not in _sources:
                _sources[path] = _digest_of(path)


def note_preloaded(module: ModuleType) -> None:
    """Record a module that a fork server has imported, in case it is a factory."""
    path = str(getattr(module, "__file__", None))
    if not (module.__name__.startswith(OWN) or path.startswith(INSTALLED)):
        note(module)


def digests(factories: Iterable[str]) -> dict[str, str]:
    """Return the hashes of the factories' source files as imported, by module."""
    names = [factory.partition(":")[0] for factory in factories]
    found: dict[str, str] = {}
    for name in names:
        module = sys.modules.get(name)
        if module is None or name.startswith(OWN):
            continue
        note(module)
        paths = {path: _sources[path] for path in _files_of(module) if path in _sources}
        for other, known in list(sys.modules.items()):
            path = getattr(known, "__file__", None)
            if path in paths:
                found[other] = paths[path]
    return found


def changed(code: Mapping[str, str]) -> str:
    """Return a source file that was imported with different content; empty: none."""
    for name, digest in code.items():
        path = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(path, str):
            with contextlib.suppress(OSError):
                if (_sources.get(path) or _digest_of(path)) != digest:
                    return path
    return ""


def check(factory: str) -> None:
    """Raise SpecError if a factory's code has changed since it was imported."""
    module = sys.modules.get(factory.partition(":")[0])
    for path in () if module is None else _files_of(module):
        with contextlib.suppress(OSError):
            if path in _sources and _digest_of(path) != _sources[path]:
                raise SpecError(
                    f"{path} has changed, but new replicas would run the code that was "
                    "imported when the service started; give the new code another "
                    "module, or restart the service"
                )


def _files_of(module: ModuleType) -> list[str]:
    """Return the files of a module, and of modules in its folder that it imports."""
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
    except (OSError, ValueError, SyntaxError):
        # The file is not Python, or only partly written.
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


def _digest_of(path: str) -> str:
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
