"""Public names and their documentation."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import pydoc
from pathlib import Path
from types import ModuleType

import pytest

import multiworld
from multiworld import errors
from tests.meta.blocking_facade import FACADE, facade

ROOT = Path(__file__).parents[2]
MODULES = [
    info.name
    for info in pkgutil.walk_packages(multiworld.__path__, "multiworld.")
    if not info.name.endswith(
        (".main", "_end", ".ray_serving", ".ray_elastic")
    )  # scripts, elsewhere
]


def test_every_public_name_resolves() -> None:
    for name in multiworld.__all__:
        assert getattr(multiworld, name) is not None
    assert set(multiworld.__all__) <= set(dir(multiworld))
    with pytest.raises(AttributeError, match="no attribute"):
        _ = multiworld.nothing_of_this_name


def test_every_error_is_public() -> None:
    """Programs must be able to catch it."""
    assert set(errors.__all__) <= set(multiworld.__all__)


def test_compatibility_names_are_where_programs_look() -> None:
    """pymultiworld's names are found under its module names."""
    from multiworld import communicator, manager, world_communicator, world_manager
    from multiworld.watchdog import WatchDog

    assert manager.WorldManager is world_manager.WorldManager
    assert communicator.WorldCommunicator is world_communicator.WorldCommunicator
    assert communicator.BrokenWorldException is multiworld.WorldBrokenError
    assert manager.BrokenWorldException is multiworld.WorldBrokenError
    assert WatchDog is multiworld.WatchDog


def test_every_module_imports_and_says_what_it_owns() -> None:
    """``test_docstrings`` checks the docstrings of the API."""
    missing = [n for n in MODULES if not importlib.import_module(n).__doc__]
    assert missing == []


API: list[type] = [
    multiworld.World,
    multiworld.WorldManager,
    multiworld.WorldCommunicator,
]


@pytest.mark.parametrize("kind", API)
def test_every_async_method_says_what_cancelling_does(kind: type) -> None:
    for name, method in vars(kind).items():
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            if name == "open":
                continue
            assert "Cancellation:" in (method.__doc__ or ""), f"{kind.__name__}.{name}"


@pytest.mark.parametrize("name", ["world_manager", "world", "watchdog", "errors"])
def test_pydoc_reads(name: str) -> None:
    assert len(pydoc.render_doc(f"multiworld.{name}")) > 1000


def test_blocking_facade_has_every_member() -> None:
    blocking: ModuleType = importlib.import_module("multiworld.blocking")
    for name in dir(multiworld.World):
        if name.startswith("_") or name == "handle":
            continue
        assert hasattr(blocking.World, name), name
        if inspect.iscoroutinefunction(getattr(multiworld.World, name)):
            found = inspect.signature(getattr(blocking.World, name)).parameters
            assert "timeout_s" in found, name
    assert hasattr(blocking.WorldManager, "keep")


def test_blocking_world_follows_from_the_declarations() -> None:
    """Otherwise run ``python -m tests.meta.blocking_facade``."""
    written = ast.parse(FACADE.read_text())
    assert ast.dump(written) == ast.dump(ast.parse(facade()))
