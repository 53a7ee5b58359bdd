"""Facts that are measured once for each hardware fingerprint."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiworld.serve.engine.compute.hardware_fingerprint import (
    fingerprint,
    known,
    processor,
)


def test_fact_is_found_out_once_for_each_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIWORLD_CACHE", str(tmp_path))
    found: list[int] = []

    def find() -> list[int]:
        found.append(1)
        return [4, 8]

    for _ in range(2):
        assert known("rows", 1, find) == [4, 8]
    assert len(found) == 1
    assert known("rows", 2, find) == [4, 8]
    assert known("keys", 1, find) == [4, 8]
    assert len(found) == 3
    for path in (tmp_path / "alike").iterdir():
        path.write_text("{")
    assert known("rows", 1, find) == [4, 8]
    assert len(found) == 4


def test_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MULTIWORLD_CACHE", str(tmp_path / "file"))
    assert known("rows", 1, lambda: [4]) == [4]


def test_kind_names_processor_release_and_threads() -> None:
    """The fingerprint names everything on which the last bits depend."""
    assert processor() in fingerprint(3)
    assert "torch 2" in fingerprint(3)
    assert "3 threads" in fingerprint(3)
    assert fingerprint(3) != fingerprint(2)
