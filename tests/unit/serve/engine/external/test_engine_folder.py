"""Folders of engines, and the removal of those that killed replicas left."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from multiworld.serve.engine.external.engine_folder import PREFIX, EngineFolder

KILLED = """
import os, signal
from multiworld.serve.engine.external.engine_folder import EngineFolder
print(EngineFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_folder_is_removed_with_its_files() -> None:
    folder = EngineFolder()
    (folder.path / "file").write_text("x")
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_folder_of_a_killed_process_is_removed_by_the_next_one() -> None:
    living = EngineFolder()
    command = [sys.executable, "-c", KILLED]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    left = Path(found.stdout.strip())
    (left / "file").write_text("x")
    EngineFolder().remove()
    assert not left.exists()
    assert living.path.exists()
    living.remove()


def test_what_is_no_folder_of_an_engine_is_left_alone(
    parent: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").write_text("x")
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    (parent / f"{PREFIX}file").write_text("x")
    (parent / "other").mkdir()
    EngineFolder().remove()
    assert (elsewhere / "file").exists()
    assert len(list(parent.iterdir())) == 3
