"""The import graph of the library, read from its source."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import multiworld

SOURCE = Path(multiworld.__file__).parent
# A package that is copied to another place, where it has another name.
COPIED = SOURCE / "serve" / "engine" / "external" / "vllm_plugin"


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("multiworld", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> frozenset[str]:
    """Return every name that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = node.module
            if node.level:
                is_copied = path.parent == COPIED and node.level == 1
                assert is_copied, f"{path}: relative imports hide the layer"
                parts = COPIED.relative_to(SOURCE).parts
                module = ".".join(("multiworld", *parts, module))
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@cache
def own(name: str) -> frozenset[str]:
    """Return the modules of the package that a module imports.

    Importing ``a.b.c`` also runs the ``__init__`` of ``a.b``; those of the packages
    hold a docstring and re-exports only, and do not count.
    """
    names = imported(modules()[name]) & set(modules())
    packages = {a for a in names if any(b.startswith(f"{a}.") for b in names)}
    return frozenset(names - packages - {name, "multiworld"})


def outside(name: str) -> set[str]:
    """Return the top-level packages from elsewhere that a module imports."""
    tops = {target.split(".")[0] for target in imported(modules()[name])}
    return tops - {"multiworld", "__future__"}


def is_pure(name: str) -> bool:
    doc = ast.get_docstring(tree(modules()[name])) or ""
    return "Pure." in doc.split()


def cycles() -> list[list[str]]:
    """Return the import cycles between files (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for target in sorted(own(name)):
            if target not in order:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], order[target])
        if low[name] == order[name]:
            ring = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(ring) > 1:
                found.append(ring)

    for name in modules():
        if name not in order:
            visit(name)
    return found
