"""Private attributes of other objects, which no test may read or set."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.imports import tree

TESTS = Path(__file__).parents[1]

OWNERS = {"self", "cls"}
"""Names of an object whose private attributes its own methods may use."""

FOREIGN = {*sys.stdlib_module_names, "torch"}
"""Packages of others; only a private name may serve the purpose there."""

NAMED_TUPLE = {"_asdict", "_fields", "_make", "_replace"}
"""Public names of named tuples; the underscore leaves all others to the fields."""

EXCEPTIONS = {
    ("soak/resident.py", "world._member"): (
        "compares the nonces of incarnations; users need only the name and the epoch"
    ),
    ("unit/backends/c10d/test_nccl.py", "made.options._timeout"): (
        "torch names the option so; the object is a fake of this test"
    ),
}
"""Reasons why a file still uses an attribute."""


def imported_from_others(file: ast.Module) -> Iterator[str]:
    """Yield the names that a file gives to packages of others and to their modules."""
    for node in ast.walk(file):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.partition(".")[0]
                if package in FOREIGN:
                    yield alias.asname or package
        elif isinstance(node, ast.ImportFrom):
            package = (node.module or "").partition(".")[0]
            if package in FOREIGN:
                yield from (alias.asname or alias.name for alias in node.names)


# The file of helpers that may use private attributes.
INNER_STATE = TESTS / "unit" / "inner_state.py"


def private_uses(file: ast.Module) -> Iterator[ast.expr]:
    """Yield the places where a file uses a private attribute of another object."""
    allowed = OWNERS | set(imported_from_others(file))
    for node in ast.walk(file):
        match node:
            case ast.Attribute(value=owner, attr=name):
                pass
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "object") | ast.Name(id="getattr"),
                args=[owner, ast.Constant(value=str(name)), *_],
            ):
                pass
            case _:
                continue
        is_private = name.startswith("_") and not name.startswith("__")
        is_allowed = isinstance(owner, ast.Name) and owner.id in allowed
        if is_private and name not in NAMED_TUPLE and not is_allowed:
            yield node


@pytest.mark.parametrize(
    ("code", "is_private"),
    [
        ("world._member.rank", True),
        ("self.world._member", True),
        ("worlds[0]._member = None", True),
        ("monkeypatch.setattr(world, '_life', None)", True),
        ("mock.patch.object(world, '_life')", True),
        ("getattr(world, '_life')", True),
        ("self._life", False),
        ("import os\nos._exit(1)", False),
        ("import os\nmonkeypatch.setattr(os, '_exit', None)", False),
        ("import os\nos.path._x", True),
        ("Phases._fields", False),
        ("world.__class__", False),
    ],
)
def test_private_uses_are_found(code: str, is_private: bool) -> None:
    assert bool([*private_uses(ast.parse(code))]) == is_private


def test_no_test_uses_a_private_attribute() -> None:
    """Such a test breaks with a change that nothing else notices."""
    found: dict[tuple[str, str], int] = {}
    for path in sorted({*TESTS.rglob("*.py")} - {INNER_STATE}):
        for node in private_uses(tree(path)):
            use = str(path.relative_to(TESTS)), ast.unparse(node)
            found[use] = node.lineno
    assert found.keys() - EXCEPTIONS.keys() == set(), found
    assert EXCEPTIONS.keys() - found.keys() == set(), "no longer needed"
