"""Layers: imports go downwards only, and importing the package has no side effect."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.meta.imports import cycles, imported, kind, modules, outside, own, tree

LAYERS = (
    {"errors"},
    {"config"},
    {"net"},
    {"rendezvous"},
    {"liveness"},
    {"incarnation"},
    {"backends"},
    {"world"},
    # Modules that only re-export the above, for programs.
    {
        "blocking",
        "communicator",
        "events",
        "manager",
        "security",
        "watchdog",
        "world_communicator",
        "world_manager",
    },
    {"testing"},
    {"serve/spec"},
    {"serve/tenants", "serve/resources"},
    {"serve/transport", "serve/models"},
    {"serve/routing"},
    {"serve/generation"},
    {"serve/worker"},
    {"serve/gateway"},
    {"serve/fleet"},
    {"serve/launchers", "serve/load"},
    {"serve/placement"},
    {"serve/scaling"},
    {"serve/simulation"},
    {"serve/control"},
    {"serve"},
    {"serve/stage"},
    {"demo", "bench"},
    {"cli"},
)
"""Parts of the package by layer, the lowest first; parts of a layer are independent."""

RANK = {name: number for number, names in enumerate(LAYERS) for name in names}

CORE = {name for names in LAYERS[:9] for name in names}
"""Parts that need torch, msgspec and the standard library only."""

IMPURE = {
    "asyncio",
    "fcntl",
    "os",
    "random",
    "secrets",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "torch",
}
"""Modules with a clock, I/O, tensors, randomness or threads."""

WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
"""Functions that read it."""

LIBRARY = sorted(
    name
    for name, path in modules().items()
    if path.name != "__init__.py" and not name.startswith("multiworld.bench.rivals.")
)


def room(name: str) -> str:
    """Return the part of the package that a module belongs to."""
    parts = name.split(".")[1:3]
    return "/".join(parts) if parts[0] == "serve" and parts[1:] else parts[0]


def test_every_module_has_a_layer() -> None:
    """Every part of the package is in ``LAYERS``."""
    rooms = {room(name) for name in modules() if "." in name}
    assert rooms == set(RANK)


def test_few_modules_read_the_wall_clock() -> None:
    """It may jump; it is used for what people see, for expiry, and for budgets only."""
    found = {
        name.removeprefix("multiworld.")
        for name in LIBRARY
        if not name.startswith(("multiworld.bench.", "multiworld.demo."))
        and any(
            ast.unparse(node) in WALL_CLOCK for node in ast.walk(tree(modules()[name]))
        )
    }
    assert found == {
        "cli.explain",
        "cli.tenants",
        "serve.control.tenant_manager",
        "serve.fleet.decision_log",
        "serve.fleet.history",
        "serve.gateway.openai",
        "serve.gateway.openai_generation",
        "serve.tenants.authenticator",
        "serve.tenants.database",
    }


@pytest.mark.parametrize("name", LIBRARY)
def test_imports_go_downwards_only(name: str) -> None:
    """Modules import only from their own part and from lower layers."""
    here = room(name)
    for target in own(name):
        there = room(target)
        assert there == here or RANK[there] < RANK[here], f"{name} imports {target}"


def test_no_files_import_each_other() -> None:
    """No two files import each other, not even inside a function."""
    assert cycles() == []


@pytest.mark.parametrize("name", LIBRARY)
def test_every_module_says_whether_it_is_pure(name: str) -> None:
    """Every module's docstring contains the sentence "Pure." or "Shell."."""
    assert kind(name), name


@pytest.mark.parametrize("name", [name for name in LIBRARY if kind(name) == "pure"])
def test_pure_modules_stand_on_pure_modules(name: str) -> None:
    """Pure modules have no clock, I/O, tensors or randomness, nor do their imports."""
    assert not outside(name) & IMPURE
    for target in own(name):
        if modules()[target].name != "__init__.py":
            assert kind(target) == "pure", f"{name} imports {target}"


def test_core_needs_torch_and_msgspec_only() -> None:
    """Only serving, the command line and the demos need other packages."""
    allowed = set(sys.stdlib_module_names) | {"torch", "msgspec"}
    for name in LIBRARY:
        if room(name) in CORE:
            assert outside(name) <= allowed, name


def test_helper_process_needs_the_standard_library_only() -> None:
    """The helper runs without site-packages, so that it starts within 10 ms."""
    helper = modules()["multiworld.liveness.heartbeat_helper"]
    tops = {target.split(".")[0] for target in imported(helper)}
    assert tops <= set(sys.stdlib_module_names) | {"__future__"}


def test_import_has_no_side_effect() -> None:
    """Importing changes no environment, logging or signal, and starts no thread."""
    code = """
import logging, os, signal, sys, threading
before = dict(os.environ), signal.getsignal(signal.SIGUSR1), signal.getsignal(2)
import multiworld
after = dict(os.environ), signal.getsignal(signal.SIGUSR1), signal.getsignal(2)
assert before == after
assert "torch" not in sys.modules
assert not [name for name in sys.modules if name.startswith("multiworld.")]
assert threading.active_count() == 1
multiworld.WorldManager
assert "torch" in sys.modules
assert not logging.getLogger().handlers
assert threading.active_count() == 1
assert not [name for name in sys.modules if name.startswith(("rich", "click"))]
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", [name for name in LIBRARY if name.startswith("multiworld.serve.")]
)
def test_serving_gets_its_clocks_injected(name: str) -> None:
    """So that tests decide what time it is; the Ray bridge is a program of its own."""
    calls = [
        node
        for node in ast.walk(tree(modules()[name]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.monotonic"
    ]
    assert not calls or name == "multiworld.serve.launchers.ray.bridge"
