"""Code, names and links in the documents."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import bench
from benchmarks.runner import SUITES
from multiworld import errors
from tests.meta.imports import modules, tree
from tests.meta.test_layers import LAYERS
from tests.ports import free_port
from tests.words import unhurried

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "examples" / "README.md",
]
README = (ROOT / "README.md").read_text()


def test_readme_code_runs(tmp_path: Path, compiled: dict[str, str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) <= 40
    program = tmp_path / "readme.py"
    program.write_text(code.replace("29500", str(free_port())))
    done = subprocess.run(
        [sys.executable, "-X", "dev", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=compiled,
    )
    assert done.returncode == 0, done.stderr
    (printed,) = re.findall(r"It prints:\n\n((?:    .*\n)+)", README)
    assert done.stdout == re.sub("^    ", "", printed, flags=re.MULTILINE)
    assert unhurried(done.stderr) == ""


def test_readme_has_no_relative_images() -> None:
    """They break where only the package's metadata is shown."""
    assert re.findall(r"!\[[^]]*\]\((?!https?://)", README) == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), f"{path}: {target}"


def test_guarantees_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    everything = "".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}" in everything, name
    for place in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / place).exists(), place


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in DOCUMENTS:
        for target in re.findall(r"make ([a-z-]+)", document.read_text()):
            if f"make {target}" in re.sub(r"`[^`]*`", "", document.read_text()):
                continue  # prose ("make sure")
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_nothing_speaks_of_where_it_was_made() -> None:
    """No tracked file names a path of the machine that it was written on."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    for name in listed.stdout.split():
        path = ROOT / name
        if not path.exists():
            continue  # removed, and not committed yet
        if path.suffix in (".py", ".md", ".toml", ".txt", ".yml", ".yaml", ""):
            assert "/work" + "/main" not in path.read_text(), name


def test_troubleshooting_quotes_real_messages() -> None:
    page = (ROOT / "docs" / "operations" / "troubleshooting.md").read_text()
    quoted = re.findall("\u201c(.*?)\u201d", page)
    assert len(quoted) > 20
    messages = "\n".join(
        text for path in modules().values() for text in _strings(tree(path))
    )
    for text in quoted:
        assert text in messages, text


def _strings(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.JoinedStr):
            parts = (
                p.value if isinstance(p, ast.Constant) else "?" for p in node.values
            )
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_statuses_of_errors_are_documented() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    for name in errors.__all__:
        status = getattr(getattr(errors, name), "status", 500)
        if status != 500 and name != "PlacementError":
            assert f"| {status} | `{name}` |" in page, name


def test_functions_on_the_path_of_a_chat_exist() -> None:
    page = (ROOT / "docs" / "serve" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`: `(\w+)`", page)
    assert len(named) > 20
    for path, function in named:
        module = ast.parse((ROOT / "src/multiworld/serve" / path).read_text())
        defined = (ast.FunctionDef, ast.AsyncFunctionDef)
        names = {each.name for each in ast.walk(module) if isinstance(each, defined)}
        assert function in names, f"{path}: {function}"


def test_every_benchmark_is_listed() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    shown = CliRunner().invoke(bench, ["--help"]).output
    for name in SUITES:
        assert f"| `{name}` |" in page, name
        assert f"\n  {name} " in shown, name
    for path in (ROOT / "benchmarks" / "studies").glob("*.py"):
        if "__main__" in path.read_text():
            assert f"python -m benchmarks.studies.{path.stem}" in page, path


def test_contributing_names_every_layer() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in {name for names in LAYERS for name in names}:
        assert f"`{name}`" in text, name
