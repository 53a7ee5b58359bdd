"""Commands for a running service, tested without one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from msgspec import structs

from multiworld.cli.logs import logs
from multiworld.cli.main import cli
from multiworld.cli.status import Seen
from multiworld.errors import ServeError
from multiworld.serve.controller.answers import (
    ShuttingDown,
    StatusAnswer,
    Updated,
    decode,
)
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.fleet.record import (
    AlreadyServedError,
    Record,
    StateFolder,
)
from multiworld.serve.controller.fleet.state import DesiredModel, DesiredState
from multiworld.serve.controller.observe.facts import Facts
from multiworld.serve.spec.loader import parse_spec
from tests.unit.serve.controller import examples

LOGS = (
    *("shop-0-2", "shop-1-3", "shop-1-0-4", "shop-eu-0-5", "gateway-1"),
    *("launcher", "launcher-12ab34cd", "store"),
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("shop", ["shop-0-2", "shop-1-3"]),
        ("shop/1", ["shop-1-3"]),
        ("shop/1/3", ["shop-1-3"]),
        ("shop-1", ["shop-1-0-4"]),
        ("shop-1/0/4", ["shop-1-0-4"]),
        ("gateway", ["gateway-1"]),
        ("launcher", ["launcher-12ab34cd", "launcher"]),
        ("store", ["store"]),
    ],
)
def test_logs_of_models_with_similar_names_are_apart(
    tmp_path: Path, name: str, found: list[str]
) -> None:
    """The name of a model may be that of another one and a number, or more words."""
    folder = StateFolder(tmp_path)
    folder.make()
    for stem in LOGS:
        (folder.logs / f"{stem}.log").write_text(f"of {stem}\n" * 3)
    done = CliRunner().invoke(logs, [name, "--state", str(tmp_path), "-n", "1"])
    shown = [line for line in done.output.splitlines() if line.startswith("of ")]
    assert shown == [f"of {stem}" for stem in found]


@pytest.mark.parametrize(
    ("first", "since", "is_cut"),
    [(52, 0.0, True), (1, 0.0, False), (52, 60.0, False), (52, None, False)],
)
def test_status_says_that_earlier_events_are_not_shown(
    first: int, since: float | None, is_cut: bool
) -> None:
    """The facts have the latest events only."""
    status = decode(json.dumps(examples.STATUS), StatusAnswer)
    facts = decode(json.dumps(examples.FACTS), Facts)
    events = tuple(
        HistoryEntry(first + n, 50.0 + n, "lost", "x", "") for n in range(200)
    )
    seen = Seen(status, structs.replace(facts, events=events), since)
    assert ("earlier ones are not shown" in seen.heading) == is_cut


def test_refusal_of_a_shutdown_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller with a full disk does not hang, and must not be killed."""

    def refuse(*_: object, **__: object) -> None:
        error = ServeError("the audit log cannot be written")
        error.__dict__["status"] = 503
        raise error

    app = parse_spec("models: {m: {factory: a:b, stages: [{}]}}")
    StateFolder(tmp_path).make()
    StateFolder(tmp_path).save(Record(app=app, specs={}, active={}))
    monkeypatch.setattr(Service, "ask", refuse)
    done = CliRunner().invoke(cli, ["shutdown", "--state", str(tmp_path)])
    assert done.exit_code == 1
    assert isinstance(done.exception, ServeError | SystemExit | click.ClickException)
    assert "audit log cannot be written" in f"{done.output} {done.exception}"
    assert "kill it" not in done.output


@pytest.mark.parametrize(
    ("wanted", "text", "outcome"),
    [
        ("3", "m: version 1 is not ready; 0 stays active", "superseded"),
        ("1", "m: version 2 is not ready; 1 stays active", "rolled back"),
        ("2", "k: version 2 is not ready; 1 stays active", "done"),
    ],
)
def test_update_distinguishes_its_outcome_from_that_of_another(
    wanted: str,
    text: str,
    outcome: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another update may follow before this one is done."""
    models = {"m": DesiredModel(wanted, (1,)), "k": DesiredModel("1", (1,))}
    shown = SimpleNamespace(
        wanted=DesiredState(models), active={"m": wanted, "k": "1"}, is_ready=True
    )
    shown.processes = ()
    answers = {
        "/status": shown,
        "/update": Updated({"m": "2", "k": "1"}, 5, 1.0),
        "/events": [HistoryEntry(6, 0.0, "rolled back", text, "")],
    }
    monkeypatch.setattr(Service, "ask", lambda _, how, path, *__, **___: answers[path])
    spec = tmp_path / "app.yaml"
    spec.write_text("app: shop\nmodels: {m: {factory: a:b, stages: [{}]}}\n")
    monkeypatch.setenv("MULTIWORLD_STATE", str(tmp_path))
    folder = StateFolder(tmp_path / "shop")
    folder.make()
    lock = folder.lock()
    done = CliRunner().invoke(cli, ["update", str(spec), "--app", "shop"])
    os.close(lock)
    last = done.output.splitlines()[-1]
    assert last.startswith(outcome)
    assert done.exit_code == (outcome != "done")
    if outcome == "superseded":
        assert last.endswith("by another update, to m 3")


def test_shutdown_without_a_controller_keeps_the_next_one_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, it would delete the files of a service that serves."""
    app = parse_spec("models: {m: {factory: a:b, stages: [{}]}}")
    folder = StateFolder(tmp_path)
    folder.make()
    folder.save(Record(app=app, specs={}, active={}))
    seen: list[bool] = []
    forget = StateFolder.forget

    def forgets(folder: StateFolder) -> None:
        with pytest.raises(AlreadyServedError):
            folder.lock()
        seen.append(True)
        forget(folder)

    monkeypatch.setattr(StateFolder, "forget", forgets)
    done = CliRunner().invoke(cli, ["shutdown", "--state", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert seen
    os.close(folder.lock())


def test_shutdown_ends_a_service_that_has_started_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits for machines, it has no record, but its controller answers."""
    monkeypatch.setenv("MULTIWORLD_STATE", str(tmp_path))
    folder = StateFolder(tmp_path / "shop")
    folder.make()
    lock = folder.lock()

    def answer(service: Service, *_: object, **__: object) -> ShuttingDown:
        assert service.folder.path == folder.path
        os.close(lock)  # as its exit does
        return ShuttingDown("shop")

    monkeypatch.setattr(Service, "ask", answer)
    done = CliRunner().invoke(cli, ["shutdown"])
    assert done.output == "shop has ended\n"
    assert done.exit_code == 0
    again = CliRunner().invoke(cli, ["shutdown", "--app", "shop"])
    assert "no service runs in" in str(again.output)
    assert again.exit_code == 1
