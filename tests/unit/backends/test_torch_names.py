"""Private names of torch, which one module looks up and checks."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from multiworld import TorchVersionError
from multiworld.backends import torch_names
from multiworld.backends.c10d.groups import check_backend
from multiworld.backends.torch_names import NAMES, WORKS, Use
from multiworld.cli import doctor
from tests.meta.imports import modules, tree

ROOT = Path(__file__).parents[3]


class _Group:
    """A class with an attribute that only its annotations name."""

    registry: dict[str, int]

    def _abort(self) -> None: ...


@pytest.fixture
def fake() -> Iterator[ModuleType]:
    """Return a module ``fake_torch.inner`` with one class."""
    outer, inner = ModuleType("fake_torch"), ModuleType("fake_torch.inner")
    outer.__path__ = []  # a package
    inner.Group = _Group  # type: ignore[attr-defined]
    sys.modules.update({"fake_torch": outer, "fake_torch.inner": inner})
    yield inner
    del sys.modules["fake_torch"], sys.modules["fake_torch.inner"]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Clear the cache, so that every name is looked up again."""
    torch_names.missing.cache_clear()
    yield
    torch_names.missing.cache_clear()


def names_of(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setitem(NAMES, "c10d", names)


@pytest.mark.usefixtures("fake")
def test_names_that_are_there_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names_of(
        monkeypatch,
        "fake_torch.inner.Group",
        "fake_torch.inner.Group._abort",
        "fake_torch.inner.Group.registry",
    )
    assert torch_names.missing("c10d") == ()
    torch_names.check("c10d")


@pytest.mark.usefixtures("fake")
def test_missing_names_are_refused_with_the_versions_that_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = ("fake_torch.gone.Group", "fake_torch.inner.Group._gone")
    names_of(monkeypatch, "fake_torch.inner.Group._abort", *gone)
    with pytest.raises(TorchVersionError) as caught:
        torch_names.check("c10d")
    error = caught.value
    assert error.missing == gone
    assert error.installed == torch.__version__
    assert error.works == WORKS
    for part in (*gone, torch.__version__, f"'torch{WORKS}'"):
        assert part in str(error)
    assert "_abort" not in str(error)


@pytest.mark.parametrize("use", ["c10d", "gloo"])
def test_a_world_on_c10d_is_refused_before_any_io(
    monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    monkeypatch.setitem(NAMES, use, ("torch._no_such_name",))
    with pytest.raises(TorchVersionError, match="_no_such_name"):
        check_backend("gloo", torch.device("cpu"))


@pytest.mark.parametrize("use", NAMES)
def test_this_torch_has_every_name(use: Use) -> None:
    if use == "nccl" and not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    assert torch_names.missing(use) == ()


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch{WORKS}" in project["dependencies"]


PRIVATE = {
    part
    for names in NAMES.values()
    for name in names
    for part in name.split(".")
    if part.startswith("_")
}


def test_no_other_module_uses_private_names_of_torch() -> None:
    """``torch_names`` has them all, and its table lists each one that it uses."""
    home = "multiworld.backends.torch_names"
    for name, path in modules().items():
        used = {
            part
            for node in ast.walk(tree(path))
            for part in _parts(node)
            if re.match("_[A-Za-z]", part)
        }
        if name == home:
            own = {n for n in used if n in vars(torch_names)}
            assert used - own <= PRIVATE, used - own - PRIVATE
        else:
            assert not used & PRIVATE, f"{name}: {used & PRIVATE}"


def _parts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        # Attributes of an object's own class are not torch's.
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [] if is_own else [node.attr]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        names = [alias.name for alias in node.names]
        return [*(node.module or "").split("."), *names]
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        return [part for name in names for part in name.split(".") if "torch" in name]
    return []


def names_found() -> doctor.Finding:
    (found,) = (f for f in doctor.examine() if f.subject == "torch's names")
    return found


def test_doctor_fails_on_a_missing_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_found().status == "ok"
    torch_names.missing.cache_clear()
    names_of(monkeypatch, "torch._no_such_name")
    finding = names_found()
    assert finding.status == "fail"
    assert "torch._no_such_name" in finding.found
    assert WORKS in finding.remedy


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.10.0", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.1+cu132", True),
        ("2.16.0a0+git1234", False),
        ("unknown", False),
    ],
)
def test_versions_are_distinguished_by_their_minor_release(
    version: str, is_tested: bool
) -> None:
    """Patch and local versions do not matter."""
    assert torch_names.is_tested(version) is is_tested
