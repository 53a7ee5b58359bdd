"""Log formats: text for people, JSON for collectors, both with request ids."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

FORMAT, LEVEL = "MULTIWORLD_LOG_FORMAT", "MULTIWORLD_LOG_LEVEL"
"""Environment variables: `text` or `json`, and the name of a level."""

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request that the current task answers."""

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def request_of(record: logging.LogRecord) -> str:
    """Return the id of the request that a line is about; empty if there is none."""
    given: str = getattr(record, "request", "")
    return given or REQUEST.get()


class TextFormatter(logging.Formatter):
    """Formatter for people: appends the request's id unless the message has it."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request = request_of(record)
        return (
            f"{line} [request {request}]" if request and request not in line else line
        )


class JsonFormatter(logging.Formatter):
    """Formatter for collectors: one JSON object a line.

    Args:
        process: Name of the process, in each line.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        found: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if request := request_of(record):
            found["request"] = request
        found |= getattr(record, "fields", {})
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def formatter_of(environment: Mapping[str, str], process: str) -> logging.Formatter:
    """Return the formatter of a process's log, as the environment names it."""
    is_json = environment.get(FORMAT, "") == "json"
    return JsonFormatter(process) if is_json else TextFormatter()


def configure(
    environment: Mapping[str, str], process: str, level: int = logging.INFO
) -> None:
    """Log to standard error, with the format and level that the environment names.

    Args:
        environment: Environment variables of this process.
        process: Name of this process.
        level: Level to use if the environment names none.
    """
    known = logging.getLevelNamesMapping()
    named = known.get(environment.get(LEVEL, "").upper(), level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_of(environment, process))
    # ``force``, because a forked process inherits its parent's log handlers.
    logging.basicConfig(level=named, force=True, handlers=[handler])
