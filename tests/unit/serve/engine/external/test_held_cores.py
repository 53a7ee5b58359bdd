"""Cores that engines hold; no two hold the same."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from multiworld.serve.engine.external.engine_process import EngineProcess
from multiworld.serve.engine.external.held_cores import HeldCores

CORES = sorted(os.sched_getaffinity(0))


def are_free() -> bool:
    every = HeldCores(len(CORES))
    found = every.numbers == CORES
    every.release()
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test its own locks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_no_two_hold_the_same_core() -> None:
    first = HeldCores(1)
    second = HeldCores(len(CORES) - 1)
    assert first.numbers == CORES[:1]
    assert second.numbers == CORES[1:]
    assert HeldCores(1).numbers == []
    first.release()
    first.release()
    third = HeldCores(1)
    assert third.numbers == CORES[:1]
    for held in (second, third):
        held.release()


def test_none_are_held_where_too_few_are_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert HeldCores(len(CORES) + 1).numbers == []
    assert f"{len(CORES)} of {len(CORES) + 1} requested cores are free" in caplog.text
    assert are_free()


def test_folder_of_somebody_else_is_no_error(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine then uses all cores."""
    (folder / f"multiworld-cores-{os.getuid()}").write_text("no folder")
    assert HeldCores(1).numbers == []
    assert "cores are not held" in caplog.text


@pytest.mark.asyncio
async def test_engine_runs_on_its_cores_until_it_ends(tmp_path: Path) -> None:
    found = []
    for number, cores in enumerate((1, 0)):
        path = tmp_path / str(number)
        program = f"grep Cpus_allowed_list /proc/self/status > {path}"
        engine = EngineProcess(["sh", "-c", program], {}, cores)
        assert are_free() == (cores == 0)
        assert await engine.wait() == 0
        engine.kill()
        found.append(path.read_text().split()[1])
    assert found[0] == str(CORES[0])
    assert found[1] != found[0] or len(CORES) == 1
    assert sorted(os.sched_getaffinity(0)) == CORES
    assert are_free()
