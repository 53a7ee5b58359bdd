"""Public docstrings are complete, and read as English."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import pytest

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
    "multiworld.serve.models.modules",
    "multiworld.serve.scaling.snapshot",
    "multiworld.testing.",
)
"""Modules that programs import from; their docstrings describe every argument."""

LIBRARY = [
    name
    for name in sorted(modules())
    if name != "multiworld" and name.split(".")[1] not in ("bench", "cli", "demo")
]

FRAGMENT = re.compile(
    r"(What|Who|Whom|Whose|Of|Have|Take note|That which|For so|So many|How|Whether"
    r"|Where|Which|As many|When|Until|If)\b"
)
"""Openings of sentence fragments."""

STRANGE = re.compile(
    r"\b(so many|for so long|as many as may|as long as they may|so often|take note of"
    r"|zygote|forsaken|struck)\b",
    re.IGNORECASE,
)
"""Phrases and words for which the field has better ones."""

DECORATED = {"overload", "override", "setter"}


class Documented(NamedTuple):
    """A function or method that its users may call."""

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
    """Yield the public functions of a module, and methods of its public classes."""
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


def docstrings(name: str) -> Iterator[tuple[str, str]]:
    """Yield every docstring of a module, with the name that it describes."""
    top = tree(modules()[name])
    for node in ast.walk(top):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            doc = ast.get_docstring(node)
            if doc:
                yield getattr(node, "name", name), doc
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for before, after in itertools.pairwise(body):
                if isinstance(before, ast.Assign | ast.AnnAssign) and (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    yield ast.unparse(before).split("=")[0], after.value.value


def is_api(name: str) -> bool:
    """Tell whether programs import from a module."""
    return any(name == a or (a.endswith(".") and name.startswith(a)) for a in API)


@pytest.mark.parametrize("name", LIBRARY)
def test_docstrings_open_with_a_verb_or_a_noun(name: str) -> None:
    """No docstring opens with a question word or a fragment, or has private idioms."""
    for where, doc in docstrings(name):
        assert not FRAGMENT.match(doc), f"{where}: {doc.splitlines()[0]}"
        assert not STRANGE.search(doc), f"{where}: {STRANGE.search(doc)}"


@pytest.mark.parametrize("name", LIBRARY)
def test_public_functions_describe_their_arguments(name: str) -> None:
    """Functions describe all arguments, in the API or if they have three or more."""
    for found in functions(name):
        names = found.parameters
        if not names or (not is_api(name) and len(names) < 3):
            continue
        section = found.doc.partition("Args:")[2]
        for parameter in names:
            assert re.search(rf"\b{parameter}\b[^:\n]*:", section), (
                f"{found.where} does not describe {parameter}"
            )


@pytest.mark.parametrize("name", LIBRARY)
def test_public_coroutines_say_what_cancelling_does(name: str) -> None:
    """Every public coroutine has a section "Cancellation:"."""
    for found in functions(name):
        is_generator = any(isinstance(n, ast.Yield) for n in ast.walk(found.node))
        if isinstance(found.node, ast.AsyncFunctionDef) and not is_generator:
            assert "Cancellation:" in found.doc, found.where


@pytest.mark.parametrize("name", [name for name in LIBRARY if is_api(name)])
def test_public_functions_describe_what_they_return_and_raise(name: str) -> None:
    """Functions of the API describe what they return and raise."""
    for found in functions(name):
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
