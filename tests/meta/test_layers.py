"""Imports go downwards only, and importing the package has no side effect."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import multiworld

SOURCE = Path(multiworld.__file__).parent

LAYERS = (
    # What everything stands on: pure, or the store's protocol.
    {
        "errors",
        "config",
        "eager",
        "early",
        "events",
        "lifecycle",
        "liveness",
        "membership",
        "heartbeat",
        "rendezvous",
        "security",
        "streams",
        "tcp",
    },
    {"backends"},
    {"beating", "beats", "endpoint", "link", "waiting_lanes", "watchdog"},
    {
        "admission",
        "keeping",
        "world",
        "world_communicator",
        "world_life",
        "world_manager",
    },
    {"manager", "communicator", "blocking"},
    {"testing"},
    {"placement"},
    {"serve"},
    {"demo", "bench"},
    {"cli"},
)
RANK = {name: number for number, names in enumerate(LAYERS) for name in names}

PURE = [
    "eager",
    "early",
    "lifecycle",
    "liveness",
    "rendezvous/claims",
    "rendezvous/reforming",
    "rendezvous/registry",
    "rendezvous/values",
    "rendezvous/address",
    "demo/worlds/ledger",
    "backends/direct/header",
    "serve/batching",
    "serve/attainment",
    "serve/choosing",
    "serve/fairness",
    "serve/tenancy/tenants",
    "serve/tenancy/limiting",
    "serve/tenancy/quarantine",
    "serve/tenancy/metering",
    "serve/tenancy/dedicating",
    "serve/forwarding",
    "serve/routing/actions",
    "serve/routing/events",
    "serve/routing/records",
    "serve/routing/refusals",
    "serve/routing/router",
    "serve/table",
    "serve/control/actions",
    "serve/control/crashes",
    "serve/control/events",
    "serve/control/places",
    "serve/control/planning",
    "serve/control/state",
    "serve/resources/admitting",
    "serve/resources/amounts",
    "serve/resources/assigning",
    "serve/resources/ledger",
    "serve/control/fleet",
    "serve/control/wanting",
    "serve/models/layers",
    "serve/scaling/snapshot",
    "serve/scaling/queueing",
    "serve/scaling/gears",
    "serve/scaling/demand",
    "serve/scaling/hindsight",
    "serve/scaling/steadying",
    "serve/scaling/telling",
    "serve/scaling/timing",
    "serve/scaling/policy",
    "serve/scaling/others",
    "serve/scaling/asking",
    "serve/scaling/sampling",
    "serve/load/summary",
    "serve/simulation/engine",
    "serve/simulation/modelling",
    "serve/simulation/foresight",
    "serve/simulation/judging",
    "placement/problem",
    "placement/model",
    "placement/greedy",
    "placement/linear",
    "placement/discrete",
    "placement/verify",
    "placement/chains",
]
IMPURE_MODULES = {"asyncio", "os", "time", "random", "secrets", "socket", "torch"}

CORE = {name for names in LAYERS[:5] for name in names} | {"backends"}


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(path: Path) -> str:
    """Return the part of the package that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def own_parts(path: Path) -> set[str]:
    """Return the parts of the package that a file imports."""
    parts = {
        name.split(".")[1] for name in imports(path) if name.startswith("multiworld.")
    }
    return parts & set(RANK)


def test_every_module_has_a_layer() -> None:
    """A new one must be put somewhere."""
    names = {layer_of(path) for path in SOURCE.rglob("*.py")} - {"__init__"}
    assert names == set(RANK)


def test_imports_go_downwards_only() -> None:
    """World and communicator may know each other's types; nothing else goes up."""
    for path in SOURCE.rglob("*.py"):
        layer = layer_of(path)
        if layer == "__init__":
            continue
        for part in own_parts(path):
            assert RANK[part] <= RANK[layer], f"{path} imports {part}"


def test_pure_modules_know_no_clock_network_or_tensor() -> None:
    """Decide purely, act thinly."""
    for name in PURE:
        used = {module.split(".")[0] for module in imports(SOURCE / f"{name}.py")}
        assert not used & IMPURE_MODULES, f"{name} imports {used & IMPURE_MODULES}"


def test_core_needs_torch_and_the_standard_library_only() -> None:
    """Everything else is for the command line and the demo."""
    allowed = set(sys.stdlib_module_names) | {"torch", "multiworld", "__future__"}
    for path in SOURCE.rglob("*.py"):
        if layer_of(path) in CORE:
            used = {module.split(".")[0] for module in imports(path)}
            assert used <= allowed, f"{path} imports {used - allowed}"


def test_helper_process_needs_the_standard_library_only() -> None:
    """It starts without site-packages, in a hundredth of a second."""
    used = {module.split(".")[0] for module in imports(SOURCE / "heartbeat.py")}
    assert used <= set(sys.stdlib_module_names) | {"__future__"}


def test_import_has_no_side_effect() -> None:
    """No torch, no logging, no environment, no signal handler, no thread."""
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


def test_no_file_is_too_long() -> None:
    """Two rooms read better than a hall."""
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 600, path
