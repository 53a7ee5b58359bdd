"""``make matrix``: the built wheel, run outside the source tree in several cells."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
CELLS = ("3.11x2.13", "3.12x2.15", "3.13x2.14", "3.11xlowest")
LOWEST = "lowest"
TAKEN = ("tests", "examples", "docs", "pyproject.toml")
"""Parts of the source tree that the tests read."""

PYTEST = (
    *("-m", "pytest", "-q", "-m", "not heavy"),
    *("--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"),
)
STEPS: dict[str, tuple[str, ...]] = {
    "doctor": ("-m", "multiworld.cli.main", "doctor"),
    "torch": (
        *PYTEST,
        "tests/unit/backends/test_torch_names.py",
        "tests/integration/test_dtensor.py",
    ),
    "contract": (*PYTEST, "tests/contract"),
    "faults": (*PYTEST, "tests/faults"),
    "serve": (*PYTEST, "tests/serve"),
    "demo": ("-m", "multiworld.cli.main", "demo", "worlds"),
    "demo-serve": ("-m", "multiworld.cli.main", "demo"),
}
"""Arguments of Python for each step of a cell."""

STEP_S = 2400
"""Seconds that one step may take."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A release of Python and one of torch, as ``3.12x2.15``.

    ``LOWEST`` in place of torch means the lowest version of every direct dependency.
    """

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Return the cell written as ``PYTHONxTORCH``."""
        pattern = rf"(3\.\d+)x(\d+\.\d+(?:\.\d+)?|{LOWEST})"
        if (match := re.fullmatch(pattern, text)) is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not like {CELLS[0]!r}")
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return f"{self.python}x{self.torch}"


@dataclass(slots=True)
class Result:
    cell: Cell
    steps: dict[str, str] = field(default_factory=dict)

    @property
    def has_passed(self) -> bool:
        return all(outcome.startswith("ok") for outcome in self.steps.values())


def find_python(release: str) -> str:
    """Return an interpreter of a release: from the path, or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = sorted(pyenv.glob(f"{release}.*/bin/python"))
    on_path = shutil.which(f"python{release}")
    for candidate in [on_path, *map(str, installed)]:
        if candidate is None:
            continue
        # A shim of pyenv is on the path, but fails for a release that is not chosen.
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run(
            [candidate, "-c", code], capture_output=True, text=True, check=False
        )
        if done.stdout.strip() == release:
            return candidate
    raise FileNotFoundError(f"no Python {release}; install it, or choose other CELLS")


def build_wheel(python: str, folder: Path) -> Path:
    """Build the wheel in ``folder`` from a copy of the source, and return its path."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        _copy(ROOT / name, source / name, ignored)
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(source)], check=True)
    shutil.rmtree(source)
    (wheel,) = folder.glob("multiworld_elastic-*.whl")
    return wheel


def _copy(
    source: Path, target: Path, ignored: object = shutil.ignore_patterns("__pycache__")
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=ignored)  # type: ignore[arg-type]
    else:
        shutil.copy(source, target)


class Runner:
    """Runs cells in a folder outside the source; ``is_kept`` keeps environments."""

    def __init__(self, folder: Path, steps: list[str], *, is_kept: bool) -> None:
        self._folder, self._steps, self._is_kept = folder, steps, is_kept
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }

    def run(self, cell: Cell, wheel: Path) -> Result:
        result = Result(cell)
        place = self._folder / str(cell)
        work = Path(tempfile.mkdtemp(prefix=f"multiworld-{cell}-"))
        try:
            for name in TAKEN:
                _copy(ROOT / name, work / name)
            python = place / "venv" / "bin" / "python"
            began_at = time.monotonic()
            try:
                self._install(cell, place, python, wheel)
            except (subprocess.CalledProcessError, FileNotFoundError) as error:
                result.steps["install"] = f"FAILED: {error}"
                return result
            result.steps["install"] = f"ok in {time.monotonic() - began_at:.0f} s"
            for name in self._steps:
                result.steps[name] = self._step(cell, name, python, work)
                print(f"{cell} {name}: {result.steps[name]}", flush=True)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            # Without a CPU build, torch brings several gigabytes of CUDA libraries.
            if not self._is_kept:
                shutil.rmtree(place, ignore_errors=True)
        return result

    def _install(self, cell: Cell, place: Path, python: Path, wheel: Path) -> None:
        if not python.exists():
            subprocess.run(
                [find_python(cell.python), "-m", "venv", place / "venv"], check=True
            )
        group = f"{ROOT / 'pyproject.toml'}:test"
        pip = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir"]
        if cell.torch == LOWEST:
            # pip cannot resolve to the lowest versions. The wheel's dependencies would
            # not count as direct, so they are read from their source, pyproject.toml.
            direct = ["-r", str(ROOT / "pyproject.toml"), "--extra", "demo"]
            direct += ["--group", group, "--resolution", "lowest-direct"]
            uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python)]
            commands = [
                [*pip, "uv"],
                [*uv, "-q", "--no-cache", *direct],
            ]
        else:
            # torch alone first, so that a CPU build is taken where one is offered.
            chosen = [f"torch=={cell.torch}.*"]
            commands = [
                [*pip, "pip>=25.1"],
                [*pip, *chosen, "setuptools"],
                [*pip, *chosen, f"{wheel}[demo]", "--group", group],
            ]
        # An environment that is used again may have an earlier build of this version.
        commands.append([*pip, "--force-reinstall", "--no-deps", str(wheel)])
        with (self.logs / f"{cell}-install.txt").open("w") as log:
            for command in commands:
                subprocess.run(
                    command, check=True, stdout=log, stderr=subprocess.STDOUT
                )
            freeze = [str(python), "-m", "pip", "freeze"]
            subprocess.run(freeze, check=True, stdout=log)

    def _step(self, cell: Cell, name: str, python: Path, work: Path) -> str:
        origin = "import multiworld; print(multiworld.__file__)"
        found = subprocess.run(
            [str(python), "-c", origin],
            cwd=work,
            env=self._environment,
            capture_output=True,
            text=True,
            check=True,
        )
        if not found.stdout.startswith(str(python.parents[1])):
            return f"FAILED: imported from {found.stdout.strip()}"
        environment = self._environment | {
            "PATH": f"{python.parent}:{self._environment['PATH']}",
        }
        path = self.logs / f"{cell}-{name}.txt"
        began_at = time.monotonic()
        with path.open("w") as log:
            try:
                done = subprocess.run(
                    [str(python), *STEPS[name]],
                    cwd=work,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=STEP_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"FAILED: not done after {STEP_S} s; see {path}"
        took_s = time.monotonic() - began_at
        lines = path.read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "")
        if done.returncode != 0:
            return f"FAILED after {took_s:.0f} s: {last.strip()}; see {path}"
        counts = f": {last.strip()}" if "pytest" in STEPS[name] else ""
        return f"ok in {took_s:.0f} s{counts}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cells", default=" ".join(CELLS), help="cells to run")
    parser.add_argument("--steps", default=" ".join(STEPS), help="steps to run")
    parser.add_argument(
        "--folder", type=Path, help="folder for environments and logs; kept afterwards"
    )
    given = parser.parse_args()
    given.cells = [Cell.parse(text) for text in given.cells.split()]
    given.steps = given.steps.split()
    if unknown := set(given.steps) - STEPS.keys():
        parser.error(f"no steps {', '.join(sorted(unknown))}; there are: {[*STEPS]}")
    return given


def main() -> int:
    given = _arguments()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="multiworld-matrix-"))
    folder = folder.resolve()
    if folder.is_relative_to(ROOT):
        print(f"{folder} is inside the source tree; give another --folder")
        return 2
    with tempfile.TemporaryDirectory() as built:
        wheel = build_wheel(sys.executable, Path(built))
        runner = Runner(folder, given.steps, is_kept=given.folder is not None)
        results = [runner.run(cell, wheel) for cell in given.cells]
    print()
    for result in results:
        print(f"{result.cell}: {'passed' if result.has_passed else 'FAILED'}")
        for name, outcome in result.steps.items():
            print(f"    {name:<11}{outcome}")
    print(f"logs: {runner.logs}")
    return 0 if all(result.has_passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
