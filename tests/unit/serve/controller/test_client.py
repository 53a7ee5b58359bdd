"""The client of a controller: typed answers, refusals and malformed answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multiworld.errors import ServeError
from multiworld.serve.controller.answers import Scaled, StatusAnswer
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.status import last_words
from tests.unit.serve.controller.service import CannedService

SCALE = {"model": "m", "stage": "add", "replicas": 2}


def test_answer_is_of_the_expected_type() -> None:
    service = CannedService({"/scale?quick=true": {"before": 1, "replicas": 2}})
    found = service.ask("POST", "/scale", Scaled, json=SCALE, params={"quick": True})
    assert found == Scaled(1, 2)
    ((method, target, body),) = service.asked
    assert (method, target) == ("POST", "/scale?quick=true")
    assert json.loads(body or b"") == SCALE


@pytest.mark.parametrize("content", [{"app": "shop"}, [], "ready", None])
def test_answer_of_an_unknown_form_names_the_route(content: object) -> None:
    service = CannedService({"/status": content})
    with pytest.raises(ServeError, match=r"answered GET /status in a format .*same"):
        service.ask("GET", "/status", StatusAnswer)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"error": "no such model", "problems": []}, "no such model"),
        ({"error": "no such model"}, "no such model"),
        ({"detail": "missing field"}, '{"detail": "missing field"}'),
    ],
)
def test_refusal_is_an_error_with_its_status(content: object, text: str) -> None:
    service = CannedService({"/scale": content}, status=404)
    with pytest.raises(ServeError) as found:
        service.ask("POST", "/scale", Scaled, json=SCALE)
    assert (str(found.value), found.value.status) == (text, 404)


def test_end_of_a_log_is_shown_without_its_time(tmp_path: Path) -> None:
    """Otherwise no two failures would be equal, and a first start never given up."""
    log = tmp_path / "m-0-2.log"
    texts = []
    for second in (1, 2):
        when = f"2026-01-31 12:00:0{second},123"
        log.write_text(f"first\n{when} ERROR multiworld.serve: m/0/2: no weights\n")
        texts.append(last_words(log))
    assert texts == ["m/0/2: no weights"] * 2
    assert last_words(log, log.stat().st_size) == "", "of an earlier process only"


def test_missing_controller_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ServeError, match=r"no controller answers in .*multiworld serve"
    ):
        Service(None, tmp_path).ask("GET", "/status", StatusAnswer)
