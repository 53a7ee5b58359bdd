"""File that keeps epochs across a restart."""

from __future__ import annotations

from pathlib import Path

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
