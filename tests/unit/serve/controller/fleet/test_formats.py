"""Formats of files on disk: files without a format are read, newer ones refused."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import ConfigError, ServeError
from multiworld.rendezvous.epoch_file import EpochFile
from multiworld.serve.controller.fleet import record
from multiworld.serve.controller.fleet.record import Record, StateFolder
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.tenants import sqlite_registry
from multiworld.serve.tenants.sqlite_registry import TenantDatabase

APP: dict[str, Any] = {
    "models": {"m": {"factory": "a:b", "version": "1", "stages": [{}]}}
}


def test_record_without_a_format_is_read_and_a_newer_one_refused(
    tmp_path: Path,
) -> None:
    folder = StateFolder(tmp_path)
    folder.make()
    folder.save(Record(app=AppSpec.model_validate(APP), specs={}, active={"m": "1"}))
    path = tmp_path / "record.json"
    saved = json.loads(path.read_text())
    assert saved.pop("format") == record.FORMAT
    path.write_text(json.dumps(saved))
    loaded = folder.load()
    assert loaded is not None
    assert loaded.active == {"m": "1"}
    path.write_text(json.dumps({**saved, "format": record.FORMAT + 1}))
    with pytest.raises(ServeError, match=f"has format {record.FORMAT + 1}"):
        folder.load()


@pytest.mark.parametrize("other", [1, sqlite_registry.FORMAT + 1])
def test_database_without_a_format_is_read_and_another_refused(
    tmp_path: Path, other: int
) -> None:
    path = tmp_path / "registry.db"
    TenantDatabase(path).close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (sqlite_registry.FORMAT,)
        db.execute("PRAGMA user_version = 0")
    db.close()
    TenantDatabase(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {other}")
    db.close()
    with pytest.raises(ServeError, match=f"has format {other}"):
        TenantDatabase(path)


def test_epochs_in_another_format_are_refused(tmp_path: Path) -> None:
    """Epochs must never decrease, so an unknown format is no empty file."""
    path = tmp_path / "epochs.json"
    first = EpochFile(path)
    first.remember("w", 4)
    first.close()
    assert json.loads(path.read_text().splitlines()[0]) == {"format": 1}
    second = EpochFile(path)
    assert second.epochs() == {"w": 4}
    second.close()
    path.write_text('{"world": "w", "epoch": 4}\n')
    with pytest.raises(ConfigError, match="not a file that a store wrote"):
        EpochFile(path)
    path.write_text('{"format": 7}\n{"world": "w", "epoch": 5}\n')
    with pytest.raises(ConfigError, match="format 7"):
        EpochFile(path)
