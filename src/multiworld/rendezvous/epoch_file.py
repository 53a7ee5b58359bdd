"""A file with the highest epoch of every name, for the next start of the store. A
change appends ``{"world": name, "epoch": number}``. At its start, a store drops
outdated lines and ignores a torn last line."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO

from multiworld.errors import ConfigError

FORMAT = 1  # named in the first line
FIRST_LINE = json.dumps({"format": FORMAT}) + "\n"


class EpochFile:
    """Durable epochs of one store; ``ConfigError`` if another store uses the file."""

    def __init__(self, path: Path) -> None:
        self._lock = path.with_name(path.name + ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            rule = "use a file that no other store uses"
            raise ConfigError("state", str(path), rule) from error
        try:
            self._epochs = _read(path) if path.exists() else {}
        except BaseException:
            self._lock.close()
            raise
        try:
            self._rewrite(path)
        except OSError:
            if not path.exists():
                self._lock.close()
                raise
            # The file could not be rewritten, e.g. because the disk is full. The
            # existing file is valid, only longer than necessary, and may have a torn
            # last line, to which the next line must not be appended.
            _cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")
        if not self._file.tell():
            self._file.write(FIRST_LINE)

    def _rewrite(self, path: Path) -> None:
        """Replace the file by one with a line for each name."""
        fresh = path.with_name(path.name + ".new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(FIRST_LINE)
            for world, epoch in self._epochs.items():
                _write(file, world, epoch)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)

    def epochs(self) -> dict[str, int]:
        return dict(self._epochs)

    def remember(self, world: str, epoch: int) -> None:
        """Store the highest epoch of a name; a crash of the machine may lose it."""
        if epoch > self._epochs.get(world, 0):
            self._epochs[world] = epoch
            _write(self._file, world, epoch)
            self._file.flush()

    def close(self) -> None:
        self._file.close()
        self._lock.close()


def _write(file: IO[str], world: str, epoch: int) -> None:
    file.write(json.dumps({"world": world, "epoch": epoch}) + "\n")


def _read(path: Path) -> dict[str, int]:
    epochs: dict[str, int] = {}
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if number == 1:
                _check_format(entry["format"], path)
                continue
            world, epoch = str(entry["world"]), int(entry["epoch"])
        except (KeyError, TypeError, ValueError) as error:
            if number == len(lines) and not text.endswith("\n"):
                # This line is incomplete: the machine lost power during the write.
                break
            rule = f"it is not a file that a store wrote (line {number}: {error})"
            raise ConfigError("state", str(path), rule) from error
        epochs[world] = max(epoch, epochs.get(world, 0))
    return epochs


def _cut_torn_line(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _check_format(found: object, path: Path) -> None:
    if found != FORMAT:
        rule = (
            f"it has format {found!r}, and this release reads {FORMAT}; use the "
            "release that wrote it"
        )
        raise ConfigError("state", str(path), rule)
