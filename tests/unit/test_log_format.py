"""Lines of logs, for people and for collectors."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from multiworld import log_format
from multiworld.log_format import REQUEST, JsonFormatter, TextFormatter


def record(text: str, **more: object) -> logging.LogRecord:
    found = logging.LogRecord("a.b", logging.WARNING, "f.py", 1, text, None, None)
    vars(found).update(more)
    return found


def test_request_comes_from_the_task_or_from_the_line() -> None:
    formatter = TextFormatter()
    assert "request" not in formatter.format(record("x"))
    token = REQUEST.set("abc")
    try:
        assert formatter.format(record("x")).endswith("a.b: x [request abc]")
        assert formatter.format(record("abc is x")).endswith("abc is x")
        assert formatter.format(record("x", request="d")).endswith("[request d]")
    finally:
        REQUEST.reset(token)


def test_json_has_a_field_for_each_fact() -> None:
    formatter = JsonFormatter("m/0/1")
    try:
        raise ValueError("why\nindeed")
    except ValueError as error:
        failed = record("x", request="abc", fields={"status": 200})
        failed.exc_info = (ValueError, error, error.__traceback__)
    line = formatter.format(failed)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("exception").endswith("ValueError: why\nindeed")
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "warning",
        "logger": "a.b",
        "process": "m/0/1",
        "message": "x",
        "request": "abc",
        "status": 200,
    }


@pytest.mark.parametrize(
    ("environment", "level", "kind"),
    [
        ({}, logging.INFO, TextFormatter),
        ({"MULTIWORLD_LOG_LEVEL": "error"}, logging.ERROR, TextFormatter),
        ({"MULTIWORLD_LOG_FORMAT": "json"}, logging.INFO, JsonFormatter),
        ({"MULTIWORLD_LOG_LEVEL": "loud"}, logging.INFO, TextFormatter),
    ],
)
def test_environment_configures(
    environment: dict[str, str], level: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **more: given.update(more))
    log_format.configure(environment, "p")
    assert given["level"] == level
    handlers: Any = given["handlers"]
    (handler,) = handlers
    assert type(handler.formatter) is kind
