"""Layers: imports go downwards only, and importing the package has no side effect."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.meta.imports import cycles, imported, is_pure, modules, outside, own, tree

LAYERS = (
    {"errors"},
    {"config", "log_format"},
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
    {"serve/spec", "serve/queueing", "serve/deadlines"},
    {"serve/machines", "serve/tenants", "serve/text"},
    {"serve/keeper", "serve/wire"},
    {"serve/tracing"},
    {"serve/routing"},
    {"serve/engine/models"},
    {"serve/engine/compute"},
    {"serve/engine/external"},
    {"serve/gateway/admission"},
    {"serve/gateway/requests", "serve/gateway/streams"},
    {"serve/gateway/http"},
    {"serve/gateway/openinference"},
    {"serve/gateway/openai"},
    {"serve/gateway"},
    {"serve/replica"},
    {"serve/replica/batches", "serve/replica/scheduling"},
    {"serve/replica/sequences"},
    {"serve/replica/whole_engines"},
    {"serve/replica/process"},
    {"serve/controller/fleet"},
    {"serve/controller/launchers", "serve/load"},
    {"serve/controller/placement"},
    {"serve/controller/scaling"},
    {"serve/controller"},
    {"serve/simulation", "serve/dashboard"},
    {"serve"},
    {"serve/stage"},
    {"demo"},
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
"""Functions that read the wall clock."""

LIBRARY = sorted(
    name
    for name, path in modules().items()
    if path.name != "__init__.py" and not name.startswith("benchmarks.rivals.")
)


def room(name: str) -> str:
    """Return the part of the package that a module belongs to."""
    parts = name.split(".")[1:]
    if parts == ["__main__"]:
        return "cli"
    for depth in (3, 2):
        if len(parts) > depth - 1 and "/".join(parts[:depth]) in RANK:
            return "/".join(parts[:depth])
    return "/".join(parts[:2]) if parts[0] == "serve" and parts[1:] else parts[0]


def test_every_module_has_a_layer() -> None:
    rooms = {room(name) for name in modules() if "." in name}
    rooms.discard("serve/engine")  # its facade; the modules are in its parts
    assert rooms == set(RANK)


def test_few_modules_read_the_wall_clock() -> None:
    """It may jump: only times for people, expiry, budgets and order may use it."""
    found = {
        name.removeprefix("multiworld.")
        for name in LIBRARY
        if not name.startswith(("benchmarks.", "multiworld.demo."))
        and any(
            ast.unparse(node) in WALL_CLOCK for node in ast.walk(tree(modules()[name]))
        )
    }
    assert found == {
        "cli.explain",
        "cli.logs",
        "cli.serve",
        "cli.status",
        "cli.tenants",
        "serve.controller.observe.observer",
        "serve.controller.tenant_manager",
        "serve.engine.external.engine_server",
        "serve.controller.fleet.decision_log",
        "serve.controller.fleet.history",
        "serve.gateway.openai.listed_models",
        "serve.gateway.http.answer_record",
        "serve.gateway.streams.streams",
        "serve.gateway.admission.authenticator",
        "serve.keeper.process",
        "serve.tenants.sqlite_registry",
        "serve.tracing.tracer",
    }


def test_imports_go_downwards_only() -> None:
    upwards = [
        f"{name} imports {target}"
        for name in LIBRARY
        for target in own(name)
        if room(target) != room(name) and RANK[room(target)] >= RANK[room(name)]
    ]
    assert upwards == []


def test_no_packages_import_each_other() -> None:
    """Whole packages of ``serve`` are layers, too."""

    def package(name: str) -> str:
        return "/".join(room(name).split("/")[:2])

    inside = [name for name in LIBRARY if package(name).startswith("serve/")]
    arrows = {
        (package(name), package(target))
        for name in inside
        for target in own(name)
        if package(target).startswith("serve/") and package(target) != package(name)
    }
    assert [pair for pair in arrows if pair[::-1] in arrows] == []
    floors = list(dict.fromkeys(package for package, _ in arrows))
    while floors:  # take away the packages that import none of those left
        free = [each for each in floors if not any((each, o) in arrows for o in floors)]
        assert free, f"these import each other in a circle: {floors}"
        floors = [each for each in floors if each not in free]


def test_no_files_import_each_other() -> None:
    """Imports inside functions count."""
    assert cycles() == []


def test_pure_modules_stand_on_pure_modules() -> None:
    """Pure modules have no clock, I/O, tensors or randomness, nor do their imports."""
    pure = [name for name in LIBRARY if is_pure(name)]
    assert len(pure) > 100
    for name in pure:
        assert not outside(name) & IMPURE, name
        for target in own(name):
            if modules()[target].name != "__init__.py":
                assert is_pure(target), f"{name} imports {target}"


def test_core_needs_torch_and_msgspec_only() -> None:
    """Only serving, the command line and the demos need other packages."""
    allowed = set(sys.stdlib_module_names) | {"torch", "msgspec"}
    for name in LIBRARY:
        if room(name) in CORE:
            assert outside(name) <= allowed, name


def test_helper_process_needs_the_standard_library_only() -> None:
    """It runs without site-packages, so that it starts within 10 ms."""
    helper = modules()["multiworld.liveness.heartbeat_helper"]
    tops = {target.split(".")[0] for target in imported(helper)}
    assert tops <= set(sys.stdlib_module_names) | {"__future__"}


def test_import_has_no_side_effect() -> None:
    code = """
import logging, os, signal, sys, threading
before = dict(os.environ), signal.getsignal(signal.SIGUSR1), signal.getsignal(2)
import multiworld
after = dict(os.environ), signal.getsignal(signal.SIGUSR1), signal.getsignal(2)
assert before == after
assert "torch" not in sys.modules
loaded = {name for name in sys.modules if name.startswith("multiworld.")}
pure = {"errors", "incarnation", "incarnation.events"}
assert loaded <= {f"multiworld.{name}" for name in pure}
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
    "module",
    ["multiworld.serve.replica.process", "multiworld.serve.controller.service"],
)
def test_processes_of_a_service_load_no_more_than_they_need(
    module: str,
) -> None:
    """torch's compiler takes a second and 100 MB of every process; scipy, half."""
    absent = ["torch._dynamo", "sympy", "scipy"]
    code = f"import sys, {module}\nprint([m for m in {absent} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"


def test_keeper_is_small() -> None:
    """It has to start within the second in which nothing is protected."""
    absent = ["torch", "uvicorn", "httptools", "pydantic", "msgspec", "numpy"]
    module = "multiworld.serve.keeper.process"
    code = f"import sys, {module}\nprint([m for m in {absent} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"


def test_serving_gets_its_clocks_injected() -> None:
    """Tests decide what time it is. The Ray bridge is a program of its own."""
    found = {
        name
        for name in LIBRARY
        if name.startswith("multiworld.serve.")
        for node in ast.walk(tree(modules()[name]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.monotonic"
    }
    assert found <= {"multiworld.serve.controller.launchers.ray.bridge"}
