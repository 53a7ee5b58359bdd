"""The logs of a service's processes, as entries with times."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

END = 2**24  # maximum number of bytes read at the end of a log
# Time format of the standard library's logs, and the length of such a time.
TIME, TIME_LENGTH = "%Y-%m-%d %H:%M:%S,%f", 23


@dataclass(slots=True)
class Entry:
    """A log line and its continuation lines, such as a stack trace."""

    at: float | None  # seconds since 1970; None: its time cannot be read
    lines: list[str]

    def is_about(self, request: str) -> bool:
        """Return whether the entry names a request by its id."""
        pattern = rf"(?<![\w-]){re.escape(request)}(?![\w-])"
        return any(re.search(pattern, line) for line in self.lines)


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a log."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - END))
            lines = file.read(END).decode(errors="replace").splitlines()
            # Drops the first line of a partly read log, because it may be incomplete.
            return lines[size > END :]
    except FileNotFoundError:  # the log has been removed meanwhile, as old logs are
        return []


def entries_of(lines: Iterable[str]) -> list[Entry]:
    """Group lines into entries; a line without a time continues the previous entry."""
    found: list[Entry] = []
    for line in lines:
        at = time_of(line)
        if at is None and found:
            found[-1].lines.append(line)
        else:
            found.append(Entry(at, [line]))
    return found


def time_of(line: str) -> float | None:
    """Return the time at which a line was written, in seconds since 1970."""
    try:
        if line.startswith("{"):
            return datetime.fromisoformat(json.loads(line)["time"]).timestamp()
        return datetime.strptime(line[:TIME_LENGTH], TIME).timestamp()
    except (ValueError, KeyError, TypeError):
        return None


def about(request: str, paths: Iterable[Path]) -> Iterator[tuple[str, Entry]]:
    """Yield the log entries that name a request, each with its log's name."""
    for path in paths:
        for entry in entries_of(last_lines(path)):
            if entry.is_about(request):
                yield path.stem, entry
