"""Completeness of the docstrings of the public API."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from tests.meta.imports import modules, tree

Function = ast.FunctionDef | ast.AsyncFunctionDef

API = (
    "multiworld.config",
    "multiworld.errors",
    "multiworld.incarnation.events",
    "multiworld.net.security",
    "multiworld.liveness.watchdog",
    "multiworld.world.blocking",
    "multiworld.world.communicator",
    "multiworld.world.manager",
    "multiworld.world.world",
    "multiworld.serve.spec.stage",
    "multiworld.serve.engine.models.modules",
    "multiworld.serve.controller.scaling.snapshot",
    "multiworld.testing.",
)
"""Modules that programs import from; their docstrings describe every argument."""

DECORATED = {"overload", "override", "setter"}


class Documented(NamedTuple):
    where: str
    node: Function
    owner: ast.ClassDef | None

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def parameters(self) -> list[str]:
        args = self.node.args
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        if self.owner is not None and not _decorated(self.node, {"staticmethod"}):
            named = named[1:]
        return [a.arg for a in named if not a.arg.startswith("_")]


def _decorated(node: Function, names: set[str]) -> bool:
    found = {ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list}
    return bool(found & names)


def functions(name: str) -> Iterator[Documented]:
    for node in tree(modules()[name]).body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            if not _decorated(node, DECORATED):
                yield Documented(f"{name}.{node.name}", node, None)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for method in node.body:
                if not isinstance(method, Function) or method.name.startswith("_"):
                    continue
                if not _decorated(method, DECORATED | {"property"}):
                    yield Documented(f"{name}.{node.name}.{method.name}", method, node)


def documented() -> Iterator[Documented]:
    for name in sorted(modules()):
        if any(name == a or (a.endswith(".") and name.startswith(a)) for a in API):
            yield from functions(name)


def test_public_functions_describe_their_arguments() -> None:
    missing = [
        f"{found.where}: {parameter}"
        for found in documented()
        for parameter in found.parameters
        if not re.search(rf"\b{parameter}\b[^:\n]*:", found.doc.partition("Args:")[2])
    ]
    assert missing == []


def test_public_coroutines_say_what_cancelling_does() -> None:
    for found in documented():
        is_generator = any(isinstance(n, ast.Yield) for n in ast.walk(found.node))
        if isinstance(found.node, ast.AsyncFunctionDef) and not is_generator:
            assert "Cancellation:" in found.doc, found.where


def test_public_functions_describe_what_they_return_and_raise() -> None:
    for found in documented():
        returns = ast.unparse(found.node.returns) if found.node.returns else "None"
        if returns not in ("None", "Self", "NoReturn"):
            assert re.search(r"Returns:|Yields:|^(Return|Yield|Tell)\b", found.doc), (
                f"{found.where} does not describe what it returns"
            )
        for node in ast.walk(found.node):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                error = ast.unparse(node.exc.func).split(".")[-1]
                if error.endswith("Error") and not error.startswith("_"):
                    assert error in found.doc, f"{found.where} raises {error}"
