"""Third-party imports: declared in ``pyproject.toml``, pinned for the tests."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.meta.imports import modules, outside, tree

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = {
    extra: {
        canonicalize_name(one.name): one
        for one in map(Requirement, texts)
        if one.name != PROJECT["name"]
    }
    for extra, texts in {
        "": PROJECT["dependencies"],
        **PROJECT["optional-dependencies"],
    }.items()
}
"""Requirements by extra, "" for none, and by canonical name."""

DISTRIBUTIONS = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}
"""Distribution of each import whose name differs from it."""

ELSEWHERE = {"vllm", "multiworld_sampler", "xllamacpp"}
"""Imports of files that run in the environment of an engine."""


def test_every_import_is_declared() -> None:
    """A distribution that others happen to install may disappear with their release."""
    declared = {name for extra in DECLARED.values() for name in extra}
    found: dict[str, str] = {}
    for module in modules():
        for top in outside(module) - sys.stdlib_module_names - ELSEWHERE:
            found[canonicalize_name(DISTRIBUTIONS.get(top, top))] = module
    assert len(found) > 20
    missing = {name: found[name] for name in found.keys() - declared}
    assert not missing, f"imported, but not in pyproject.toml: {missing}"


def test_serve_needs_its_extra_only() -> None:
    waiting = [
        "multiworld.serve.controller.service",
        "multiworld.serve.gateway.process",
        "multiworld.serve.replica.process",
    ]
    reached: dict[str, str] = dict.fromkeys(waiting, "")
    allowed = {*DECLARED[""], *DECLARED["serve"]}
    while waiting:
        module = waiting.pop()
        for name in _imported_at_once(tree(modules()[module])):
            top = name.partition(".")[0]
            if top == "multiworld":
                parts = name.split(".")
                for end in range(1, len(parts) + 1):
                    parent = ".".join(parts[:end])
                    if parent in modules() and parent not in reached:
                        reached[parent] = module
                        waiting.append(parent)
            elif top not in sys.stdlib_module_names:
                needed = canonicalize_name(DISTRIBUTIONS.get(top, top))
                assert needed in allowed, _chain(module, reached) + f" imports {top}"


def _imported_at_once(node: ast.AST) -> Iterator[str]:
    """Yield the names that a module imports when it is imported."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            yield inner.module
            yield from (f"{inner.module}.{alias.name}" for alias in inner.names)
        elif isinstance(inner, ast.If) and "TYPE_CHECKING" in ast.unparse(inner.test):
            continue
        elif not isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imported_at_once(inner)


def _chain(module: str, reached: dict[str, str]) -> str:
    """Return how a module was reached, from the first importer on."""
    names = [module]
    while reached[names[-1]]:
        names.append(reached[names[-1]])
    return " → ".join(reversed(names))


@pytest.mark.parametrize("extra", DECLARED)
def test_requirements_are_bounded_and_pinned(extra: str) -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = {
        canonicalize_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    }
    for name, requirement in DECLARED[extra].items():
        operators = {one.operator for one in requirement.specifier}
        assert operators & {">=", "=="}, f"{requirement} has no lower bound"
        assert name in pins, f"constraints.txt does not pin {name}"
        assert pins[name] in requirement.specifier, f"{requirement}, pin {pins[name]}"
