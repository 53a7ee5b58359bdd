"""A fork server that its controller forks from itself before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.serve.harness import wait_for_exit
from tests.unit.serve.controller.launchers.test_local_launcher import (
    WAIT_S,
    python_path,
)


def starter(folder: Path, word: str, *, code: int = 0) -> list[str]:
    """Run the program; return the lines that it printed after the first."""
    env = {**os.environ, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1"}
    module = "tests.unit.serve.controller.launchers.starter"
    ran = subprocess.run(
        [sys.executable, "-m", module, str(folder), word],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.returncode == code
    first, *lines = ran.stdout.splitlines()
    assert first == "before the fork"
    assert first not in lines  # what was printed before is not printed twice
    return lines


def test_first_processes_are_forked_from_it(tmp_path: Path) -> None:
    """It has its own log and the highest limit of open files."""
    _, *lines = starter(tmp_path, "runs")
    assert lines == ["True", "True", "0", "1", "7", "None"]
    assert "No module named 'no'" in (tmp_path / "launcher.log").read_text()


def test_another_is_started_if_it_has_died(tmp_path: Path) -> None:
    """As after the loss of any fork server, one launch fails."""
    _, error, *lines = starter(tmp_path, "dies")
    assert "did not start" in error
    assert lines == ["True", "False", "0", "1", "7", "None"]


def test_it_ends_with_a_controller_that_never_uses_it(tmp_path: Path) -> None:
    (pid,) = starter(tmp_path, "goes unused")
    wait_for_exit(int(pid))


def test_it_ends_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    (pid,) = starter(tmp_path, "is killed", code=-9)
    wait_for_exit(int(pid))


def test_a_process_with_several_threads_is_not_forked(tmp_path: Path) -> None:
    assert starter(tmp_path, "has threads") == ["None"]
