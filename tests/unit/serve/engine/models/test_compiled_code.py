"""C code that is compiled when it is first needed, and kept."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import multiworld
from multiworld.serve.engine.compute.layer_code import SOURCE as LAYERS
from multiworld.serve.engine.compute.layer_code import can_run
from multiworld.serve.engine.models import compiled_code
from multiworld.serve.engine.models import integer_linear as integers
from multiworld.serve.engine.models.integer_products import SOURCE, CompiledProducts

ROOT = Path(__file__).parents[5]

NEEDS_COMPILER = pytest.mark.skipif(
    isinstance(compiled_code.outcome(SOURCE), str), reason="not compiled here"
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return an empty cache folder, with nothing loaded."""
    monkeypatch.setenv("MULTIWORLD_CACHE", str(tmp_path))
    compiled_code.outcome.cache_clear()
    yield tmp_path
    compiled_code.outcome.cache_clear()


def test_a_machine_with_a_compiler_uses_it() -> None:
    """Otherwise a fault could leave the compiled code unused, and so untested."""
    is_avx2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if platform.machine() != "x86_64" or not is_avx2 or not shutil.which("cc"):
        pytest.skip("there is no compiler, or no AVX2")
    assert can_run()
    kernel = integers.packed(*integers.quantized(torch.randn(8, 8)), [8])
    assert type(kernel) is CompiledProducts


def test_wheels_have_all_c_files() -> None:
    """Otherwise an installed package would silently be slower."""
    package = Path(multiworld.__file__).parent
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = declared["tool"]["setuptools"]["package-data"]["multiworld"]
    found = {path for pattern in patterns for path in package.glob(pattern)}
    sources = {*package.rglob("*.c")}
    assert {SOURCE, LAYERS} <= sources <= found


@NEEDS_COMPILER
def test_compiled_code_is_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process loads it without a compiler, unless others may write to it."""
    compiled_code.load(SOURCE)
    (kept,) = (fresh / "compiled").iterdir()
    monkeypatch.setattr(subprocess, "Popen", _refuse)
    compiled_code.outcome.cache_clear()
    compiled_code.load(SOURCE)
    kept.chmod(0o777)
    compiled_code.outcome.cache_clear()
    with pytest.raises(NotImplementedError, match="no compiler today"):
        compiled_code.load(SOURCE)


def _refuse(*_: object, **__: object) -> None:
    raise OSError("no compiler today")


@NEEDS_COMPILER
def test_a_cache_that_cannot_be_used_is_done_without(fresh: Path) -> None:
    (fresh / "compiled").touch()
    compiled_code.load(SOURCE)
    (fresh / "compiled").unlink()
    compiled_code.outcome.cache_clear()
    compiled_code.load(SOURCE)
    (kept,) = (fresh / "compiled").iterdir()
    kept.unlink()  # a new file: this process has mapped the old one
    kept.write_bytes(b"")
    kept.chmod(0o700)
    compiled_code.outcome.cache_clear()
    compiled_code.load(SOURCE)
    assert kept.stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("MULTIWORLD_COMPILE", "0", "MULTIWORLD_COMPILE is 0"),
        ("CC", "no-such-compiler", "no-such-compiler"),
        ("CC", "false", "false"),
        ("CC", 'cc "', "No closing quotation"),
        ("CC", "printf \\377 1>&2; false", "No such file"),
    ],
)
@NEEDS_COMPILER
def test_torch_computes_where_nothing_can_be_compiled(
    name: str, value: str, error: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, scale = integers.quantized(torch.randn(17, 68))
    given = torch.randn(3, 68)
    wanted = integers.packed(weight, scale, [17]).products(given)[0]
    compiled_code.outcome.cache_clear()
    monkeypatch.setenv(name, value)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=error):
            compiled_code.load(SOURCE)
        monkeypatch.setattr(subprocess, "Popen", None)
    kernel = integers.packed(weight, scale, [17])
    assert isinstance(kernel, integers.TorchKernel)
    assert torch.equal(kernel.products(given)[0], wanted)


@NEEDS_COMPILER
def test_a_folder_of_others_is_not_used(fresh: Path) -> None:
    """The owner could put another file there."""
    folder = fresh / "compiled"
    folder.mkdir()
    folder.chmod(0o777)
    compiled_code.load(SOURCE)
    assert not [*folder.iterdir()]
    folder.rmdir()
    (fresh / "elsewhere").mkdir()
    folder.symlink_to(fresh / "elsewhere")
    compiled_code.outcome.cache_clear()
    compiled_code.load(SOURCE)
    assert not [*folder.iterdir()]


@NEEDS_COMPILER
def test_a_home_is_not_needed(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may have no home directory."""
    monkeypatch.delenv("MULTIWORLD_CACHE")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    compiled_code.load(SOURCE)


@NEEDS_COMPILER
def test_a_compiler_that_hangs_is_ended(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, children = fresh / "slow", fresh / "children"
    script.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! >> {children}\nwait\n")
    script.chmod(0o700)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(compiled_code, "COMPILE_S", 0.5)
    with pytest.raises(NotImplementedError, match="took more than"):
        compiled_code.load(SOURCE)
    (child,) = map(int, children.read_text().split())
    until = time.monotonic() + 10.0
    while _lives(child):
        assert time.monotonic() < until
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z" and os.path.exists(f"/proc/{pid}")
