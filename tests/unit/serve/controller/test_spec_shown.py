"""The spec that a service runs, and what differs from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multiworld.serve.controller.answers import StatusAnswer, decode
from multiworld.serve.controller.spec_shown import shown, text_of
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.profiles import ModelProfile, StageProfile
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


def test_profile_is_not_read_again(tmp_path: Path) -> None:
    """Its path is relative to the folder of a file that is not known later."""
    stages = [
        StageProfile(
            name=name,
            weight_bytes=10,
            loaded_bytes=10,
            peak_bytes=2**20,
            out_bytes=4.0,
            seconds={1: 0.001},
            kv_bytes=0.0,
        )
        for name in ("front", "back")
    ]
    profile = ModelProfile(
        model="m",
        version="2",
        device="cpu",
        threads=1,
        base_bytes=1,
        dtype="",
        stages=stages,
    )
    (tmp_path / "needs.json").write_text(profile.model_dump_json())
    text = TEXT.replace("factory: a:b", "factory: a:b\n    profile: needs.json")
    app = parse_spec(text, str(tmp_path / "app.yaml"))
    again = parse_spec(text_of(app), "spec")
    assert app.models["m"].stages[0].memory_mb
    assert [stage.memory_mb for stage in again.models["m"].stages] == [
        stage.memory_mb for stage in app.models["m"].stages
    ]


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


def test_version_that_was_rolled_back_may_have_had_other_stages() -> None:
    wanted = {**examples.STATUS["wanted"]}
    wanted["models"] = {"m": {**wanted["models"]["m"], "replicas": [1]}}
    found = shown(
        parse_spec(TEXT, "here"), "", status(active={"m": "1"}, wanted=wanted)
    )
    assert found.differences == ("m: version 1 serves, not 2",)


def test_service_that_runs_its_spec_has_no_differences() -> None:
    text = TEXT.replace("replicas: 3", "replicas: 1").replace('"2"', '"1"')
    app = parse_spec(text.replace("replicas: 2", "replicas: 1"), "here")
    wanted = {**examples.STATUS["wanted"]}
    wanted["models"] = {"m": {**wanted["models"]["m"], "replicas": [1, 1]}}
    other = examples.process(name="m/1/2", stage=1)
    processes = [examples.process(), other]
    found = shown(app, "", status(wanted=wanted, processes=processes))
    assert found.differences == ()


@pytest.mark.parametrize("text", ["1e3", "41e2", "1.5e3", "12e4567", "017"])
def test_texts_that_look_like_numbers_stay_texts(text: str) -> None:
    given = TEXT.replace(
        'version: "2"', f'version: "{text}"\n    options: {{a: "{text}"}}'
    )
    app = parse_spec(given, "here")
    assert app.models["m"].options == {"a": text}
    assert parse_spec(text_of(app), "here") == app
