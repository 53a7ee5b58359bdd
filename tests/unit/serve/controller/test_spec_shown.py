"""The spec that a service runs, and what differs from it."""

from __future__ import annotations

import json
from typing import Any

from multiworld.serve.controller.answers import StatusAnswer, decode
from multiworld.serve.controller.spec_shown import shown, text_of
from multiworld.serve.spec.loader import parse_spec
from tests.unit.serve.controller import examples

TEXT = """
app: a
models:
  m:
    factory: a:b
    version: "2"
    stages:
    - {name: front, replicas: 3}
    - {name: back, replicas: 2}
"""


def status(**changes: Any) -> StatusAnswer:
    return decode(json.dumps({**examples.STATUS, **changes}), StatusAnswer)


def test_spec_is_written_as_it_was_given() -> None:
    app = parse_spec(TEXT, "here")
    written = text_of(app)
    assert parse_spec(written, "here") == app
    assert "identity" not in written


def test_what_runs_otherwise_is_said() -> None:
    app = parse_spec(TEXT, "here")
    found = shown(app, "before", status(active={"m": "1"}, processes=[]))
    assert found.before == "before"
    assert found.differences == (
        "m: version 1 serves, not 2",
        "m/front: scaled to 1, the spec says 3",
        "m/front: 0 of 1 replicas are ready",
        "m/back: 0 of 2 replicas are ready",
    )


def test_service_that_runs_its_spec_has_no_differences() -> None:
    text = TEXT.replace("replicas: 3", "replicas: 1").replace('"2"', '"1"')
    app = parse_spec(text.replace("replicas: 2", "replicas: 1"), "here")
    wanted = {**examples.STATUS["wanted"]}
    wanted["models"] = {"m": {**wanted["models"]["m"], "replicas": [1, 1]}}
    other = examples.process(name="m/1/2", stage=1)
    processes = [examples.process(), other]
    found = shown(app, "", status(wanted=wanted, processes=processes))
    assert found.differences == ()
