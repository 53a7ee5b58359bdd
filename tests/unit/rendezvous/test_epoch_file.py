"""File that keeps epochs across a restart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from multiworld.rendezvous.epoch_file import EpochFile


def test_epochs_outlast_a_restart(tmp_path: Path) -> None:
    """The highest epoch counts, and a torn line is dropped alone."""
    path = tmp_path / "epochs"
    memory = EpochFile(path)
    for epoch in (1, 3, 2):
        memory.remember("w", epoch)
    memory.remember("x y\n", 7)
    memory.close()
    with path.open("a") as file:
        file.write('{"world": "z", "ep')
    again = EpochFile(path)
    assert again.epochs() == {"w": 3, "x y\n": 7}
    again.close()
    assert len(path.read_text().splitlines()) == 3, "the format, and two names"


@pytest.mark.parametrize("text", ['{"world": "b", "ep', None], ids=["last", "first"])
def test_torn_line_on_a_full_disk_does_not_spoil_the_next(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file cannot be rewritten at the start, and can be appended to later."""
    path = tmp_path / "epochs.json"
    file = EpochFile(path)
    file.remember("a", 7)
    file.close()
    if text is None:
        path.write_text('{"form')
    else:
        with path.open("a") as torn:
            torn.write(text)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        file = EpochFile(path)
    file.remember("c", 3)
    file.remember("d", 4)
    file.close()
    file = EpochFile(path)
    known = {} if text is None else {"a": 7}
    assert file.epochs() == {**known, "c": 3, "d": 4}
    file.close()
