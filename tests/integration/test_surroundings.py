"""The command line without a home, and in old encodings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multiworld.serve.controller.fleet.record import state_root
from multiworld.serve.engine.models.caches import cache_folder

COMMAND = [sys.executable, "-m", "multiworld.cli.main"]


def run(*words: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in another environment; an empty value removes a variable."""
    changed = {k: v for k, v in {**os.environ, **env}.items() if v}
    return subprocess.run(
        [*COMMAND, *words],
        env=changed,
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_is_written_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    """Characters that an encoding lacks are escaped."""
    spec = tmp_path / "app.yaml"
    spec.write_text("models: {m: {factory: 'none.such:f', stages: [{}]}}\n")
    done = run("serve", str(spec), "--state", str(tmp_path), PYTHONIOENCODING=encoding)
    assert done.returncode == 1
    assert b"UnicodeEncodeError" not in done.stderr
    assert b"starting app" in done.stdout
    assert b"cannot be imported" in done.stderr


def test_spec_is_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """In another encoding, a name would be a different one."""
    spec = tmp_path / "app.yaml"
    spec.write_text("models: {größe: {stages: [{}]}}\n", encoding="utf-8")
    done = run("plan", str(spec), LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="utf-8")
    assert "größe".encode() in done.stderr


def test_user_without_a_home_has_folders_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands use the same folders; those of another user are not taken."""
    for name in ("MULTIWORLD_STATE", "MULTIWORLD_CACHE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", staticmethod(none))
    folder = tmp_path / f"multiworld-home-{os.getuid()}"
    assert cache_folder() == folder / ".cache" / "multiworld"
    assert state_root() == folder / ".local" / "state" / "multiworld"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(Exception, match="set MULTIWORLD_STATE and MULTIWORLD_CACHE"):
        cache_folder()


def test_folder_in_place_of_a_spec_says_what_to_give(tmp_path: Path) -> None:
    """The error names the spec in it; ``serve`` also takes the folder of a model."""
    (tmp_path / "app.yaml").write_text("")
    done = run("serve", str(tmp_path))
    assert f"give its spec, {tmp_path}/app.yaml".encode() in done.stderr
    (tmp_path / "config.json").write_text("{}")
    done = run("serve", str(tmp_path), "--print-spec")
    assert f"path: {tmp_path}".encode() in done.stdout
    (tmp_path / "app.yaml").unlink()
    done = run("plan", str(tmp_path))
    assert f"path: {tmp_path}".encode() in done.stderr
    (tmp_path / "app.yaml").write_text("")
    done = run("plan", str(tmp_path))
    assert f"give its spec, {tmp_path}/app.yaml".encode() in done.stderr


@pytest.mark.parametrize("words", [["serve", "a" * 300], ["plan", "a" * 300]])
def test_name_that_is_too_long_for_a_file_is_a_message(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 1
    assert b"File name too long" in done.stderr
    assert b"Traceback" not in done.stderr
